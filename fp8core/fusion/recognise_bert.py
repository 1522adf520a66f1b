"""Blocks built as BERT's: attention, then an MLP, each with its norm behind the residual sum.

The norm behind attention is the one before the MLP, and is fused with that; the one behind the MLP
stays a layer of its own. Roberta, Electra and others have the same blocks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8core.fusion.children import activation, described_norm, hooked, linears
from fp8core.fusion.layouts import PostNorm
from fp8core.fusion.parts import Activation, AttentionHalf, Halves, MLPHalf

__all__ = ["BERT", "describe_halves", "is_built_so"]

BERT = PostNorm(
    "BERT",
    frozenset(("attention", "intermediate", "output")),
    attention="attention.self",
    rotated=False,
    within="attention",
    after="attention.output",
    up="intermediate",
    down="output",
    dense="dense",
    dropout="dropout",
    norm="LayerNorm",
)

_RESIDUAL = frozenset((BERT.dense, BERT.dropout, BERT.norm))
_ACTIVATIONS: dict[str, Activation] = {"gelu_tanh": "gelu", "gelu": "gelu_erf"}


def is_built_so(block: nn.Module) -> bool:
    """Whether it has attention and an MLP as BERT has them; it may have more."""
    attention = block._modules.get(BERT.within)
    inner = set() if attention is None else _children(attention)
    return _children(block) >= BERT.children and {"self", "output"} <= inner


def describe_halves(name: str, block: nn.Module, config: Any) -> Halves:
    """Of a block with BERT's children and no others."""
    halves = Halves(BERT)
    halves.causal = getattr(block.get_submodule(BERT.attention), "is_causal", None) is True
    odd = _children(block.get_submodule(BERT.within)) ^ {"self", "output"}
    for path in (BERT.after, BERT.down):
        odd |= _children(block.get_submodule(path)) ^ _RESIDUAL
    if odd:
        halves.reasons.append(f"its parts are not those of a BERT block: {', '.join(sorted(odd))}")
        return halves
    for path in (BERT.after, BERT.down):
        dropout = block.get_submodule(f"{path}.{BERT.dropout}")
        if type(dropout) is not nn.Dropout:
            halves.reasons.append(f"{name}.{path}.dropout is a {type(dropout).__name__}")
            return halves
    attention, mlp = _attention(name, block, config), _mlp(name, block)
    if isinstance(attention, str):
        halves.reasons.append(attention)
    else:
        halves.attention = attention
    if isinstance(mlp, str):
        halves.reasons.append(mlp)
    else:
        halves.mlp = mlp
    return halves


def _attention(name: str, block: nn.Module, config: Any) -> AttentionHalf | str:
    attention: Any = block.get_submodule(BERT.attention)
    path = f"{name}.{BERT.attention}"
    hooks = hooked(name, block, BERT.without_attention)
    if hooks is not None:
        return hooks
    dropout = attention._modules.get("dropout")
    others = _children(attention) - {"query", "key", "value", "dropout"}
    if others or attention._parameters:
        odd = sorted(others | attention._parameters.keys())
        return f"{path} has other parts than q, k, v and a dropout: {', '.join(odd)}"
    if dropout is not None and type(dropout) is not nn.Dropout:
        return f"{path}.dropout is a {type(dropout).__name__}"
    inputs = linears(path, attention, ("query", "key", "value"))
    outputs = linears(f"{name}.{BERT.after}", block.get_submodule(BERT.after), (BERT.dense,))
    if isinstance(inputs, str) or isinstance(outputs, str):
        return inputs if isinstance(inputs, str) else str(outputs)
    if len({linear.bias is None for linear in inputs}) > 1:
        return f"{path}: some of q, k and v have a bias and some have none"
    causal = getattr(attention, "is_causal", None)
    if not isinstance(causal, bool):
        return f"{path} does not say whether it looks ahead"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{path} changes the scores before the softmax"
    heads, head_dim = (
        getattr(attention, key, None) for key in ("num_attention_heads", "attention_head_size")
    )
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return f"{path} does not say how wide its heads are"
    if any(linear.out_features != heads * head_dim for linear in inputs):
        return f"{path}: {heads} heads of {head_dim} do not fit its layers"
    return AttentionHalf(
        name=path,
        module=attention,
        norm=None,
        norm_name=None,
        inputs=inputs,
        o=outputs[0],
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=float(getattr(attention, "scaling", head_dim**-0.5)),
        window=None,
        head_norms=False,
        rotated=False,
        causal=causal,
        dropout=dropout,
    )


def _mlp(name: str, block: nn.Module) -> MLPHalf | str:
    hooks = hooked(name, block, BERT.without_mlp)
    if hooks is not None:
        return hooks
    up_module: Any = block.get_submodule(BERT.up)
    path = f"{name}.{BERT.up}"
    others = _children(up_module) - {"dense", "intermediate_act_fn"}
    if others:
        return f"{path} has other parts than a dense layer: {', '.join(sorted(others))}"
    ups = linears(path, up_module, ("dense",))
    downs = linears(f"{name}.{BERT.down}", block.get_submodule(BERT.down), (BERT.dense,))
    norm_name = f"{name}.{BERT.after}.{BERT.norm}"
    norm = described_norm(norm_name, block.get_submodule(f"{BERT.after}.{BERT.norm}"))
    for found in (ups, downs, norm):
        if isinstance(found, str):
            return found
    assert not isinstance(ups, str)
    assert not isinstance(downs, str)
    assert not isinstance(norm, str)
    if (ups[0].bias is None) != (downs[0].bias is None):
        return f"{name}: one layer of its MLP has a bias and one has none"
    function = activation(getattr(up_module, "intermediate_act_fn", None))
    if function not in _ACTIVATIONS:
        return f"{path} has an activation that is not GELU"
    return MLPHalf(
        name=f"{name}.mlp",
        norm=norm,
        norm_name=norm_name,
        inputs=ups,
        down=downs[0],
        activation=_ACTIVATIONS[function],
        prefix=name,
        returns_norm=True,
    )


def _children(module: nn.Module) -> set[str]:
    return {key for key, child in module._modules.items() if child is not None}
