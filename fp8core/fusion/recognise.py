"""Blocks found by their structure: Llama's and those of its many descendants, GPT-2's and BERT's.

A block is a module with the children of a `BlockLayout` and no other; its class is never asked for
its name. What is found here is a claim about what the block computes; `check` proves it on
numbers before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fp8core.engines.protocol import NormDescription
from fp8core.fusion import recognise_bert
from fp8core.fusion.children import Function, activation, described_norm, hooked, linears
from fp8core.fusion.layouts import BlockLayout, PreNorm
from fp8core.fusion.parts import AttentionHalf, GatedActivation, Halves, MLPHalf, NamedLinear

__all__ = ["NO_BLOCKS", "attention_elsewhere", "describe_block", "find_blocks"]

NO_BLOCKS = (
    "the model has no blocks built as Llama's, GPT-2's or BERT's, with attention, then an MLP, and "
    "a norm before or behind each"
)
"""Why nothing of a model is fused in which `find_blocks` finds nothing."""


def _pre_norm(family: str, *children: str, rotated: bool) -> PreNorm:
    """Children in their order: norm, attention, norm, MLP."""
    norm, attention, mlp_norm, mlp = children
    return PreNorm(family, frozenset(children), attention, rotated, norm, mlp_norm, mlp)


LLAMA = _pre_norm(
    "Llama", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", rotated=True
)
GPT2 = _pre_norm("GPT-2", "ln_1", "attn", "ln_2", "mlp", rotated=False)
BERT = recognise_bert.BERT

_GATED: dict[Function | None, GatedActivation] = {"silu": "swiglu", "gelu_tanh": "geglu"}


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of everything that has attention and an MLP of its own: candidates."""
    for name, module in model.named_modules():
        if _layout(module) is not None:
            yield name, module


def attention_elsewhere(model: nn.Module, blocks: Iterable[nn.Module]) -> bool:
    """Whether ``model`` attends outside of ``blocks`` too, as far as its modules say so."""
    within = {id(module) for block in blocks for module in block.modules()}
    return any(hasattr(m, "is_causal") and id(m) not in within for m in model.modules())


def _layout(module: nn.Module) -> BlockLayout | None:
    """The one whose attention and MLP it has; its norms may be others."""
    children = {key for key, child in module._modules.items() if child is not None}
    for layout in (LLAMA, GPT2):
        # Of GPT-2's names the attention's alone would be found in many a vision model.
        norms = set() if layout is LLAMA else {layout.attention_norm, layout.mlp_norm}
        if {layout.attention, layout.mlp} | norms <= children:
            return layout
    return BERT if recognise_bert.is_built_so(module) else None


def describe_block(name: str, block: nn.Module, config: Any) -> Halves:
    """The halves of ``block`` (see `find_blocks`) that fusion knows, and why not the others."""
    layout = _layout(block)
    if layout is None:
        raise ValueError(f"{name} is not a block")
    halves = Halves(layout)
    children = {key for key, child in block._modules.items() if child is not None}
    if children != layout.children:
        odd = ", ".join(sorted(children ^ layout.children))
        halves.reasons.append(f"its parts are not those of a {layout.family} block: {odd}")
        return halves
    if "forward" in block.__dict__:
        halves.reasons.append("its forward was replaced on this one object")
        return halves
    if not isinstance(layout, PreNorm):
        return recognise_bert.describe_halves(name, block, config)
    # Where an attention does not say, it may do either: blocks of these kinds look back.
    attention = block.get_submodule(layout.attention)
    halves.causal = getattr(attention, "is_causal", True) is not False
    if layout is LLAMA:
        describe_attention, describe_mlp = _attention, _mlp
    else:
        describe_attention, describe_mlp = _gpt2_attention, _gpt2_mlp
    for describe, passed_by in (
        (describe_attention, layout.without_attention),
        (describe_mlp, layout.without_mlp),
    ):
        # Hooks of what a half replaces would not be called; those of the block itself are.
        found = hooked(name, block, passed_by) or describe(name, block, config)
        if isinstance(found, AttentionHalf):
            halves.attention = found
        elif isinstance(found, MLPHalf):
            halves.mlp = found
        else:
            halves.reasons.append(found)
    return halves


def _attention(name: str, block: nn.Module, config: Any) -> AttentionHalf | str:
    attention: Any = block.get_submodule("self_attn")
    path = f"{name}.self_attn"
    children = {key for key, child in attention._modules.items() if child is not None}
    wanted = {"q_proj", "k_proj", "v_proj", "o_proj"}
    head_norms = children == wanted | {"q_norm", "k_norm"}
    if children != wanted and not head_norms:
        return f"{path} has other parts than q, k, v and o: {', '.join(sorted(children ^ wanted))}"
    layers = linears(path, attention, ("q_proj", "k_proj", "v_proj", "o_proj"))
    norm = described_norm(f"{name}.input_layernorm", block.get_submodule("input_layernorm"))
    for found in (layers, norm):
        if isinstance(found, str):
            return found
    assert not isinstance(layers, str)
    assert not isinstance(norm, str)
    q, k, v, o = layers
    if len({linear.bias is None for linear in (q, k, v)}) > 1:
        return f"{path}: some of q, k and v have a bias and some have none"
    if getattr(attention, "is_causal", None) is not True:
        return f"{path} is not causal"
    if getattr(attention, "attention_dropout", 0.0):
        return f"{path} drops attention weights out"
    if getattr(config, "attn_logit_softcapping", None) or hasattr(attention, "sinks"):
        return f"{path} changes the scores before or in the softmax"
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or q.out_features % head_dim:
        return f"{path} does not say how wide its heads are"
    heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
    if v.out_features != k.out_features or kv_heads < 1 or heads % kv_heads:
        return f"{path}: {heads} heads of q and {kv_heads} of k and v do not fit"
    if head_norms:
        for child in ("q_norm", "k_norm"):
            described = described_norm(f"{path}.{child}", attention.get_submodule(child))
            if isinstance(described, str):
                return described
            if described.normalized_shape != (head_dim,):
                return f"{path}.{child} normalises over more than one head"
    return AttentionHalf(
        name=path,
        module=attention,
        norm=norm,
        norm_name=f"{name}.input_layernorm",
        inputs=(q, k, v),
        o=o,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=float(getattr(attention, "scaling", head_dim**-0.5)),
        window=_window(attention, config),
        head_norms=head_norms,
        rotated=True,
    )


def _window(attention: Any, config: Any) -> int | None:
    """As transformers has it: the layer's own, else the configuration's where it has but one."""
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif getattr(config, "layer_types", None):
        window = None
    else:
        window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def _mlp(name: str, block: nn.Module, config: Any) -> MLPHalf | str:
    mlp: Any = block.get_submodule("mlp")
    path = f"{name}.mlp"
    wanted = ("gate_proj", "up_proj", "down_proj")
    children = {key for key, child in mlp._modules.items() if child is not None}
    if children - {"act_fn"} != set(wanted):
        odd = sorted((children - {"act_fn"}) ^ set(wanted))
        return f"{path} has other parts than gate, up and down: {', '.join(odd)}"
    layers = linears(path, mlp, wanted)
    norm = described_norm(
        f"{name}.post_attention_layernorm", block.get_submodule("post_attention_layernorm")
    )
    for found in (layers, norm):
        if isinstance(found, str):
            return found
    assert not isinstance(layers, str)
    assert not isinstance(norm, str)
    gate, up, down = layers
    if any(linear.bias is not None for linear in layers):
        return f"{path} has biases"
    gated = _GATED.get(activation(getattr(mlp, "act_fn", None)))
    if gated is None:
        return f"{path} has an activation that is neither SiLU nor GELU in its tanh approximation"
    return MLPHalf(
        name=path,
        norm=norm,
        norm_name=f"{name}.post_attention_layernorm",
        inputs=(gate, up),
        down=down,
        activation=gated,
    )


def _gpt2_attention(name: str, block: nn.Module, config: Any) -> AttentionHalf | str:
    attention: Any = block.get_submodule("attn")
    path = f"{name}.attn"
    found = _gpt2_half(name, block, path, attention, "ln_1", ("c_attn", "c_proj"))
    if isinstance(found, str):
        return found
    norm, (joint, output) = found
    if getattr(attention, "is_causal", None) is not True:
        return f"{path} is not causal"
    head_dim, heads = (getattr(attention, key, None) for key in ("head_dim", "num_heads"))
    if not isinstance(head_dim, int) or not isinstance(heads, int):
        return f"{path} does not say how wide its heads are"
    if joint.out_features != 3 * heads * head_dim:
        return f"{path}: {heads} heads of {head_dim} do not fit {joint.out_features} features"
    return AttentionHalf(
        name=path,
        module=attention,
        norm=norm,
        norm_name=f"{name}.ln_1",
        inputs=(joint,),
        o=output,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=float(getattr(attention, "scaling", head_dim**-0.5)),
        window=None,
        head_norms=False,
        rotated=False,
    )


def _gpt2_mlp(name: str, block: nn.Module, config: Any) -> MLPHalf | str:
    mlp: Any = block.get_submodule("mlp")
    path = f"{name}.mlp"
    found = _gpt2_half(name, block, path, mlp, "ln_2", ("c_fc", "c_proj"))
    if isinstance(found, str):
        return found
    norm, (up, down) = found
    if activation(getattr(mlp, "act", None)) != "gelu_tanh":
        return f"{path} has an activation that is not GELU in its tanh approximation"
    return MLPHalf(path, norm, f"{name}.ln_2", (up,), down, "gelu")


def _gpt2_half(
    name: str, block: nn.Module, path: str, parent: Any, norm_key: str, keys: tuple[str, str]
) -> tuple[NormDescription, tuple[NamedLinear, ...]] | str:
    """The norm and the two linear layers of a half that drops nothing out."""
    for key, child in parent._modules.items():
        if isinstance(child, nn.Dropout) and child.p:
            return f"{path}.{key} drops out"
        if child is not None and key not in keys and child._parameters:
            return f"{path} has another part: {key}"
    layers = linears(path, parent, keys)
    if isinstance(layers, str):
        return layers
    if len({linear.bias is None for linear in layers}) > 1:
        return f"{path}: one of its layers has a bias and one has none"
    norm = described_norm(f"{name}.{norm_key}", block.get_submodule(norm_key))
    return norm if isinstance(norm, str) else (norm, layers)
