"""Decoder blocks found by their structure: Llama's and those of its many descendants, and GPT-2's.

A block is a module with the four children of a `BlockLayout` and no other; its class is never asked
for its name. What is found here is a claim about what the block computes; `check` proves it on
numbers before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.conversion.find import is_conv1d
from fp8core.conversion.norms import describe_norm
from fp8core.engines.protocol import NormDescription
from fp8core.fusion.parts import (
    AttentionHalf,
    BlockLayout,
    GatedActivation,
    Halves,
    MLPHalf,
    NamedLinear,
)

__all__ = ["NO_BLOCKS", "describe_block", "find_blocks"]

NO_BLOCKS = (
    "the model has no blocks built as Llama's or GPT-2's, with a norm before attention and one "
    "before the MLP"
)
"""Why nothing of a model is fused in which `find_blocks` finds nothing."""

LLAMA = BlockLayout("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", rotated=True)
GPT2 = BlockLayout("ln_1", "attn", "ln_2", "mlp", rotated=False)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of everything that has attention and an MLP of its own: candidates."""
    for name, module in model.named_modules():
        if _layout(module) is not None:
            yield name, module


def _layout(module: nn.Module) -> BlockLayout | None:
    """The one whose attention and MLP it has; its norms may be others."""
    children = {key for key, child in module._modules.items() if child is not None}
    for layout in (LLAMA, GPT2):
        # Of GPT-2's names the attention's alone would be found in many a vision model.
        norms = set() if layout is LLAMA else {layout.attention_norm, layout.mlp_norm}
        if {layout.attention, layout.mlp} | norms <= children:
            return layout
    return None


def describe_block(name: str, block: nn.Module, config: Any) -> Halves:
    """The halves of ``block`` (see `find_blocks`) that fusion knows, and why not the others."""
    layout = _layout(block)
    if layout is None:
        raise ValueError(f"{name} is not a block")
    halves = Halves(layout)
    children = {key for key, child in block._modules.items() if child is not None}
    if children != layout.children:
        odd, of = sorted(children ^ layout.children), "Llama" if layout is LLAMA else "GPT-2"
        halves.reasons.append(f"its parts are not those of a {of} block: {', '.join(odd)}")
        return halves
    if "forward" in block.__dict__:
        halves.reasons.append("its forward was replaced on this one object")
        return halves
    if layout is LLAMA:
        describe_attention, describe_mlp = _attention, _mlp
    else:
        describe_attention, describe_mlp = _gpt2_attention, _gpt2_mlp
    for describe, parts in (
        (describe_attention, (layout.attention_norm, layout.attention)),
        (describe_mlp, (layout.mlp_norm, layout.mlp)),
    ):
        found = _hooked(name, block, parts) or describe(name, block, config)
        if isinstance(found, AttentionHalf):
            halves.attention = found
        elif isinstance(found, MLPHalf):
            halves.mlp = found
        else:
            halves.reasons.append(found)
    return halves


def _hooked(name: str, block: nn.Module, children: tuple[str, ...]) -> str | None:
    """Hooks of what a half replaces would not be called; those of the block itself are."""
    for child in children:
        for path, module in block.get_submodule(child).named_modules(prefix=f"{name}.{child}"):
            if any(getattr(module, hooks) for hooks in _HOOKS):
                return f"{path} has hooks, which would not be called"
    return None


def _attention(name: str, block: nn.Module, config: Any) -> AttentionHalf | str:
    attention: Any = block.get_submodule("self_attn")
    path = f"{name}.self_attn"
    children = {key for key, child in attention._modules.items() if child is not None}
    wanted = {"q_proj", "k_proj", "v_proj", "o_proj"}
    head_norms = children == wanted | {"q_norm", "k_norm"}
    if children != wanted and not head_norms:
        return f"{path} has other parts than q, k, v and o: {', '.join(sorted(children ^ wanted))}"
    linears = _linears(path, attention, ("q_proj", "k_proj", "v_proj", "o_proj"))
    norm = _norm(f"{name}.input_layernorm", block.get_submodule("input_layernorm"))
    for found in (linears, norm):
        if isinstance(found, str):
            return found
    assert not isinstance(linears, str)
    assert not isinstance(norm, str)
    q, k, v, o = linears
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
            described = _norm(f"{path}.{child}", attention.get_submodule(child))
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
    linears = _linears(path, mlp, wanted)
    norm = _norm(
        f"{name}.post_attention_layernorm", block.get_submodule("post_attention_layernorm")
    )
    for found in (linears, norm):
        if isinstance(found, str):
            return found
    assert not isinstance(linears, str)
    assert not isinstance(norm, str)
    gate, up, down = linears
    if any(linear.bias is not None for linear in linears):
        return f"{path} has biases"
    activation = _activation(getattr(mlp, "act_fn", None))
    if activation is None:
        return f"{path} has an activation that is neither SiLU nor GELU in its tanh approximation"
    return MLPHalf(
        name=path,
        norm=norm,
        norm_name=f"{name}.post_attention_layernorm",
        inputs=(gate, up),
        down=down,
        activation=activation,
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
    if _activation(getattr(mlp, "act", None)) != "geglu":
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
    linears = _linears(path, parent, keys)
    if isinstance(linears, str):
        return linears
    if len({linear.bias is None for linear in linears}) > 1:
        return f"{path}: one of its layers has a bias and one has none"
    norm = _norm(f"{name}.{norm_key}", block.get_submodule(norm_key))
    return norm if isinstance(norm, str) else (norm, linears)


def _linears(path: str, parent: Any, names: tuple[str, ...]) -> tuple[NamedLinear, ...] | str:
    found = []
    for name in names:
        module = parent._modules.get(name)
        if module is None:
            return f"{path} has no {name}"
        if type(module) is not nn.Linear and not is_conv1d(module):
            return f"{path}.{name} is a {type(module).__name__}, not a plain Linear"
        found.append(NamedLinear(f"{path}.{name}", module))
    return tuple(found)


def _norm(name: str, module: nn.Module) -> NormDescription | str:
    norm = describe_norm(module)
    if isinstance(norm, str):
        return f"{name}: {norm}"
    if norm.weight is None:
        return f"{name} has no weight"
    return norm


def _activation(function: Any) -> GatedActivation | None:
    """What ``function`` computes, proved on numbers in float64."""
    if not callable(function):
        return None
    points = torch.linspace(-12.0, 12.0, 769, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            values = function(points)
    # An activation may be any callable, and fail in any way.
    except Exception:
        return None
    references: dict[GatedActivation, Tensor] = {
        "swiglu": nn.functional.silu(points),
        "geglu": nn.functional.gelu(points, approximate="tanh"),
    }
    for activation, reference in references.items():
        if isinstance(values, Tensor) and torch.allclose(values, reference, rtol=1e-9, atol=1e-12):
            return activation
    return None
