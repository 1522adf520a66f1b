"""Adapters for the proof of a block, which is fused before its own are put around its layers.

Fresh adapters add nothing, for their matrices B are zeros. These are modules of ``peft`` too, with
values by which one that is left out, scaled otherwise or added to another layer shows.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8core.fusion.adapters import PlannedAdapters
from fp8core.fusion.blocks import FusedBlock
from fp8core.fusion.parts import NamedLinear

__all__ = ["probed"]

_SHARE = 0.25
"""How large an adapter's sum is, beside what its layer computes.

Larger ones sharpen the softmax, in whose gradients the roundings of bf16 then come near the bound.
Of smaller ones the outputs would show little; the gradients of A and B show a wrong scale or place
whatever the size.
"""


@contextmanager
def probed(block: FusedBlock, planned: PlannedAdapters | None) -> Iterator[None]:
    """Inside, layers of ``block`` that are fused have random adapters, and all else is frozen.

    Where none of them is to get one, nothing is changed. Random numbers are drawn from no
    generator of the process.
    """
    linears = [one for one in block.linears if planned is not None and one.name in planned.layers]
    if planned is None or not linears:
        yield
        return
    layer = block.layer
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    try:
        _put_around(block, linears, planned)
        yield
    finally:
        for linear in linears:
            parent, key = _place(block, linear)
            setattr(layer.get_submodule(parent), key, linear.module)
        layer.__dict__.pop("peft_config", None)
        for parameter in trained:
            parameter.requires_grad_(True)


def _put_around(
    block: FusedBlock, linears: Sequence[NamedLinear], planned: PlannedAdapters
) -> None:
    from peft import LoraConfig, inject_adapter_in_model  # it takes seconds to import

    layer = block.layer
    device = linears[0].parameter.device
    config = LoraConfig(
        r=planned.settings.rank,
        lora_alpha=planned.settings.alpha,
        lora_dropout=planned.settings.dropout,
        # As one expression: of a list's names each stands for all that end like it too, as
        # BERT's output.dense does for attention.output.dense.
        target_modules="|".join(re.escape(_relative(block, linear)) for linear in linears),
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        # Of what merging and saving would need, which never come.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, layer)
    generator = torch.Generator(device=device).manual_seed(0)
    for linear in linears:
        around: Any = layer.get_submodule(_relative(block, linear))
        for name in around.lora_A:
            down, up = around.lora_A[name].weight, around.lora_B[name].weight
            for parameter in (down, up):
                parameter.data = parameter.data.float().normal_(generator=generator)
            down.data.mul_(linear.in_features**-0.5)
            own = torch.linalg.vector_norm(linear.weight.detach(), dtype=torch.float32)
            size = _SHARE * own / (linear.out_features * planned.settings.rank) ** 0.5
            up.data.mul_(size / around.scaling[name])


def _relative(block: FusedBlock, linear: NamedLinear) -> str:
    return linear.name.removeprefix(f"{block.name}.")


def _place(block: FusedBlock, linear: NamedLinear) -> tuple[str, str]:
    parent, _, key = _relative(block, linear).rpartition(".")
    return parent, key
