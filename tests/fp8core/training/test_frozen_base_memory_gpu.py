"""Memory of a frozen base in FP8 at rest, at a step's peak and while it is stored, on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fp8core.training.frozen_base import store_base
from tests.fp8core.fusion.test_te_fusion_gpu import batch_of, loss_of, train

pytest.importorskip("peft")
from tests.fp8core.fusion.loras import ALL  # it imports peft
from tests.fp8core.training.stored_bases_gpu import SCALINGS, made  # it imports peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
"""Weights that outweigh the activations of `batch_of`: 16 Mi elements a block and more."""


def elements(model: Any) -> int:
    """Of the weights of all layers in blocks, adapters apart."""
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and ".layers." in name and "lora_" not in name
    )


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
@pytest.mark.parametrize("keys", [ALL, ("q_proj", "v_proj")], ids=["all", "qv"])
def test_memory_at_rest_and_at_the_peak(recipe: str, fuse: str, keys: tuple[str, ...]) -> None:
    """At rest a byte a weight is left; and at a step's peak the casts that waited are no more.

    At a time dgrad turns over the weights of one GEMM, or of both of an MLP in one module.
    """
    rest, peak, weights, largest, size = {}, {}, 0, 0, 0
    warm, engine, report = made(recipe, base="fp8", fuse=fuse, keys=keys)
    train(engine, warm, 1)  # workspaces of GEMMs, which stay
    del warm, engine, report
    for base in ("stored", "fp8"):
        before = allocated()
        model, engine, report = made(
            recipe, base=base, fuse=fuse, keys=keys, num_hidden_layers=6, **WIDE
        )
        weights = elements(model)
        if base != "fp8":
            size = model.model.layers[0].mlp.down_proj.weight.element_size()
        largest = 3 * WIDE["hidden_size"] * WIDE["intermediate_size"]
        rest[base] = allocated() - before
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for step in range(3):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            loss_of(engine, model, batch_of(step, packed=False), None).backward()
            engine.after_backward()
            optimizer.step()
            optimizer.zero_grad()
        peak[base] = torch.cuda.max_memory_allocated() - before
        del model, engine, report, optimizer, trained  # the report holds the model
    print(recipe, fuse, keys, {k: v / weights for k, v in rest.items()}, end=" ")
    print({k: v / weights for k, v in peak.items()}, largest / weights)
    assert size > 1
    # What kernels keep for themselves, a few MiB, comes with the first model or with the second.
    assert rest["stored"] - rest["fp8"] == pytest.approx((size - 1) * weights, rel=0.1)
    # Of what waited in casts for the backward pass there is no more than one turned over.
    assert peak["fp8"] < peak["stored"] - size * weights + largest + 0.1 * weights


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_storing_takes_no_more_than_one_gemm_beside_what_was_there(
    fuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core.numerics.float8_weight._ELEMENTS_AT_ONCE", 1 << 18)
    model, engine, report = made("delayed", base="bf16", fuse=fuse, num_hidden_layers=3, **WIDE)
    before, weights = allocated(), elements(model)
    torch.cuda.reset_peak_memory_stats()
    store_base(report, engine)
    grown = torch.cuda.max_memory_allocated() - before
    largest = (2 if fuse == "auto" else 1) * WIDE["hidden_size"] * WIDE["intermediate_size"]
    print(fuse, grown / weights, largest / weights)
    # And what is cast at a time, in fp32, a few times over.
    assert grown < largest + (1 << 18) * 4 * 6
    assert before - allocated() == pytest.approx(weights, rel=0.1)
