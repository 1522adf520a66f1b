"""What the probes of `accelerate_faults` are made of: the small models, and how they are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peers.fault_sides import Backend, Side, device
from torch import Tensor, nn

Seen = dict[str, Any]
TOKENS, WIDTH = 64, 64


@dataclass(frozen=True)
class Probe:
    """One fault. ``alone``: it changes the process for good and needs one of its own."""

    number: str
    title: str
    backend: Backend
    observe: Callable[[Side], Seen]
    right: Callable[[Seen], bool]
    alone: bool = False
    needs_gpu: bool = False


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def placed(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).to(device())


def rows(width: int = WIDTH, *, seed: int = 1) -> Tensor:
    """Values that bf16 holds exactly: ``[TOKENS, width]``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(TOKENS, width, generator=generator)
    return values.bfloat16().float().to(device())


def mean_square(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x).float().square().mean()


def llama(**fields: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        **fields,
    )
    return LlamaForCausalLM(config).to(device())  # type: ignore[no-any-return]


def next_token(model: Any) -> Tensor:
    ids = torch.arange(TOKENS, device=device()).reshape(2, -1)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())
