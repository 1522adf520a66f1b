"""``nn.MultiheadAttention`` with projections that are layers, for an engine to take.

torch's own keeps the weights of its input projections as bare Parameters, often packed in one, and
reads the weight of its output projection without calling that module. Here each of the four is a
module; the Parameters stay where they were, under their own keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core.conversion.weight_views import Part, PartLinear

__all__ = [
    "INPUT_PROJECTIONS",
    "ProjectedAttention",
    "attention_refusal",
    "encoders_around",
    "input_projections",
]

INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

_PARAMETERS = {
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
}


def attention_refusal(
    attention: nn.MultiheadAttention, referenced_elsewhere: set[int]
) -> str | None:
    """Why the projections of this module stay as they are, whatever an engine could take."""
    kind, name = type(attention), "nn.MultiheadAttention"
    if kind is not nn.MultiheadAttention:
        return f"{kind.__name__} is a subclass of {name} and may compute something else"
    if "forward" in attention.__dict__ or "forward" in attention.out_proj.__dict__:
        return f"the forward of its {name} was replaced on this one object"
    wanted = ("in_proj_weight",) if attention._qkv_same_embed_dim else _separate_keys()
    computed = [key for key in wanted if attention._parameters.get(key) is None]
    if type(attention.out_proj).__name__ != "NonDynamicallyQuantizableLinear":
        return f"its output projection is a {type(attention.out_proj).__name__}, not torch's own"
    if computed or attention.out_proj._parameters.get("weight") is None:
        return f"a weight of its {name} is not a Parameter of its own (it is computed by a hook)"
    children = sorted(attention._modules.keys() - {"out_proj"})
    if children:
        return f"its {name} holds further modules: {', '.join(children)}"
    strangers = sorted(attention._parameters.keys() - _PARAMETERS)
    strangers += sorted(attention.out_proj._parameters.keys() - {"weight", "bias"})
    if strangers:
        return f"its {name} holds further parameters: {', '.join(strangers)}"
    if {id(attention), id(attention.out_proj)} & referenced_elsewhere:
        return (
            "another module holds it outside the module tree, where a replacement would not reach"
        )
    return None


def _separate_keys() -> tuple[str, ...]:
    return tuple(f"{name}_weight" for name in INPUT_PROJECTIONS)


def input_projections(attention: nn.MultiheadAttention, owner: nn.Module) -> dict[str, Part]:
    """The weights of the three input projections by name, as parts of ``owner``'s Parameters.

    ``owner`` holds the Parameters of ``attention`` under their own keys, or is it.
    """
    size = attention.embed_dim
    bias_key = None if attention.in_proj_bias is None else "in_proj_bias"
    packed = attention._qkv_same_embed_dim
    return {
        name: Part(
            owner=owner,
            weight_key="in_proj_weight" if packed else f"{name}_weight",
            bias_key=bias_key,
            weight_start=place * size if packed else 0,
            bias_start=place * size,
            rows=size,
        )
        for place, name in enumerate(INPUT_PROJECTIONS)
    }


class ProjectedAttention(nn.Module):
    """Computes what the given ``nn.MultiheadAttention`` does, through four Linear modules.

    It holds the same Parameters under the same keys; ``q_proj``, ``k_proj`` and ``v_proj`` have
    none of their own and see their rows of ``in_proj_weight`` (or ``q_proj_weight`` and so on) and
    ``in_proj_bias``; ``out_proj`` is the given module's. Each may be replaced by another layer.
    """

    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        for key, parameter in attention._parameters.items():
            self.register_parameter(key, parameter)
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.head_dim, self.dropout = attention.head_dim, attention.dropout
        self.batch_first, self.add_zero_attn = attention.batch_first, attention.add_zero_attn
        # By this torch's encoder layers leave their fused path, which reads the weights itself.
        self._qkv_same_embed_dim = False
        self.q_proj, self.k_proj, self.v_proj = (
            PartLinear(part) for part in input_projections(attention, self).values()
        )
        self.out_proj = attention.out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; shapes and masks are those it documents.

        Raises ValueError for shapes that do not fit and TypeError for nested tensors and masks of
        whole numbers; RuntimeError for ``is_causal`` without ``attn_mask``, as torch does.
        """
        _check_shapes(query, key, value)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which must be given as well")
        batched = query.dim() == 3
        q, k, v = (
            self._by_batch(layer(x), batched)
            for layer, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        _check_masks(q, k, self.num_heads, key_padding_mask, attn_mask)
        padding = _additive(key_padding_mask, "key_padding_mask", query.dtype)
        # The hint stands in for the mask where the kernel can make use of it, as in torch.
        is_causal = is_causal and padding is None and not need_weights
        mask = None if is_causal else _additive(attn_mask, "attn_mask", query.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = _behind(k, self.bias_k), _behind(v, self.bias_v)
            padding, mask = _one_more(padding), _one_more(mask)
        if self.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
            padding, mask = _one_more(padding), _one_more(mask)
        q, k, v = self._by_head(q), self._by_head(k), self._by_head(v)
        mask = _merged(mask, padding, q)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            attended, weights = _with_weights(q, k, v, mask, dropout)
        else:
            weights = None
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
            )
        rows = attended.transpose(1, 2).flatten(2)
        output = self.out_proj(rows if self.batch_first or not batched else rows.transpose(0, 1))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output, weights

    def _by_batch(self, projected: Tensor, batched: bool) -> Tensor:
        """[batch, tokens, embed_dim], whatever the layout of the inputs."""
        if not batched:
            return projected.unsqueeze(0)
        return projected if self.batch_first else projected.transpose(0, 1)

    def _by_head(self, projected: Tensor) -> Tensor:
        """[batch, heads, tokens, head_dim]."""
        return projected.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise TypeError("converted attention takes no nested tensors; pad them, with a mask")
    dims = (query.dim(), key.dim(), value.dim())
    if dims not in ((2, 2, 2), (3, 3, 3)):
        raise ValueError(f"query, key and value are all 2-D or all 3-D, not {dims}")
    if key.shape[:-1] != value.shape[:-1]:
        shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"key and value are of the same sequences and tokens, not {shapes}")


def _check_masks(
    q: Tensor, k: Tensor, heads: int, padding: Tensor | None, mask: Tensor | None
) -> None:
    batch, targets, sources = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"query has {batch} sequences, key and value have {k.shape[0]}")
    if padding is not None and tuple(padding.shape) != (batch, sources):
        raise ValueError(f"key_padding_mask is {(batch, sources)}, not {tuple(padding.shape)}")
    wanted = ((targets, sources), (batch * heads, targets, sources))
    if mask is not None and tuple(mask.shape) not in wanted:
        raise ValueError(f"attn_mask is {wanted[0]} or {wanted[1]}, not {tuple(mask.shape)}")


def _additive(mask: Tensor | None, name: str, dtype: torch.dtype) -> Tensor | None:
    """A mask of numbers that are added to the scores; True of a boolean one forbids."""
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is boolean or floating point, not {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _behind(tokens: Tensor, learned: Tensor) -> Tensor:
    """One learned token, [1, 1, embed_dim], behind those of each sequence."""
    return torch.cat([tokens, learned.to(tokens.dtype).expand(tokens.shape[0], 1, -1)], dim=1)


def _one_more(mask: Tensor | None) -> Tensor | None:
    """For a key that was added behind the others, which everyone may look at."""
    return None if mask is None else functional.pad(mask, (0, 1))


def _merged(mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """Both masks as one that fits [batch, heads, targets, sources], in the dtype of the scores."""
    batch, heads = query.shape[:2]
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
    if padding is not None:
        padding = padding.reshape(batch, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return None if mask is None else mask.to(query.dtype)


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scores = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout > 0.0:
        weights = functional.dropout(weights, p=dropout)
    return weights @ value, weights


def encoders_around(model: nn.Module, attention: nn.Module) -> list[nn.TransformerEncoder]:
    """The ``nn.TransformerEncoder``s of ``model`` that would hand nested tensors to ``attention``.

    In evaluation they pack padded sequences so for the fused path of their layers.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module, "use_nested_tensor", False)
        and any(inner is attention for inner in module.modules())
    ]
