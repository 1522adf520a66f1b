"""LoRA beside the layers of models that are fused: planned, wrapped as a job does, and computed."""

from __future__ import annotations

from typing import Any

import peft
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.fusion import ModelFusion, PlannedAdapters, fused_inputs
from fp8core.spec import LoraAdapter

__all__ = ["ALL", "BERT", "GPT2", "SETTINGS", "outputs", "planned", "reasons", "wrap"]

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2 = ("c_attn", "c_proj", "c_fc")
# Its three dense layers: of attention's output, and both of the MLP.
BERT = ("query", "key", "value", "dense")
SETTINGS = LoraAdapter(rank=4, alpha=6.0)


def planned(model: Any, keys: tuple[str, ...], settings: LoraAdapter = SETTINGS) -> PlannedAdapters:
    names = {
        name
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in keys and ".transform." not in name
    }
    return PlannedAdapters(frozenset(names), settings)


def wrap(model: Any, adapters: PlannedAdapters, *, size: float = 0.2, **more: Any) -> Any:
    """As a job does, but with matrices B that are not zeros: their deviation is ``size``."""
    settings = adapters.settings
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=sorted(adapters.layers),
        fan_in_fan_out=type(model).__name__.startswith("GPT2"),
        **more,
    )
    kinds = {type(model.get_submodule(name)) for name in adapters.layers}
    foreign = {kind for kind in kinds if kind.__name__ not in ("Linear", "Conv1D")}
    config._register_custom_module(dict.fromkeys(foreign, LoraLinear))
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return wrapped


def outputs(model: Any, batch: Batch, *, fused: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits at real tokens, and the gradients of a sum over them by parameter."""
    model.zero_grad()
    inputs = (
        fused_inputs(model, batch, torch.float32) if fused else model_inputs(batch, model.config)
    )
    torch.manual_seed(1)
    logits = model(**{**inputs, "use_cache": False}).logits[batch.document_ids >= 0]
    (logits.square() * torch.linspace(0.1, 1.0, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def reasons(fusion: ModelFusion) -> list[str | None]:
    return [row.reason for row in fusion.rows]
