"""Probes of recipe fields, and of training: sharded, with torchao, with recomputed activations."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers.fault_sides import Prepared, Side, device
from peers.probe_parts import (
    TOKENS,
    WIDTH,
    Probe,
    Seen,
    linear,
    llama,
    mean_square,
    next_token,
    placed,
    relative_error,
    rows,
)
from torch import Tensor, nn

HIGH_PRECISION_BELOW = 0.01
"""Relative error of a product: bf16 rounds to about 0.003, an FP8 operand to about 0.03."""


def algorithm_at_work(prepared: Prepared) -> str:
    """Told by the scale after an amax of 8 and then one of 1; E4M3 ends at 448."""
    for amax in (8.0, 1.0):
        x = torch.full((TOKENS, WIDTH), amax, device=device())
        prepared.backward(mean_square(x))
    scale = prepared.scale("0")
    return {448.0: "most_recent", 56.0: "max"}.get(scale, f"scale {scale}")


def most_recent(side: Side) -> Seen:
    prepared = side.prepare(placed(linear()), "te", amax_compute_algo="most_recent")
    return {"asked for": "most_recent", "at work": algorithm_at_work(prepared)}


def default_algorithm(side: Side) -> Seen:
    prepared = side.prepare(placed(linear()), "te")
    return {"documented": side.documented_algorithm(), "at work": algorithm_at_work(prepared)}


def interval(side: Side) -> Seen:
    prepared = side.prepare(placed(linear()), "te", interval=4, amax_history_len=1)
    scales = [1.0]
    for step in range(8):
        x = torch.full((TOKENS, WIDTH), 2.0**step, device=device())
        prepared.backward(mean_square(x))
        scales.append(prepared.scale("0"))
    changed = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(scales)) if a != b]
    return {"scale changed at updates": changed, "should change at": [1, 5]}


def high_precision_gemms(prepared: Prepared, weight: Tensor) -> list[bool]:
    """Of fprop, dgrad and wgrad of the only Linear, which ran in high precision: by their errors.

    ``weight``: [out, in], as it was before the model was prepared.
    """
    x, gradient = rows().requires_grad_(), rows(seed=2)
    outputs: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        output: Tensor = model(x)
        outputs.append(output)
        return (output.float() * gradient).sum()

    prepared.optimizer.zero_grad()
    prepared.backward(loss)
    found: Any = next(iter(prepared.model.parameters())).grad
    if hasattr(found, "full_tensor"):
        found = found.full_tensor()
    assert x.grad is not None
    w, g = weight.double(), gradient.double()
    errors = (
        relative_error(outputs[0].detach(), x.detach().double() @ w.T),
        relative_error(x.grad, g @ w),
        relative_error(found, g.T @ x.detach().double()),
    )
    return [error < HIGH_PRECISION_BELOW for error in errors]


def told(precisions: list[bool] | tuple[bool, ...]) -> str:
    return "".join("H" if high else "F" for high in precisions)


def unit_normal(model: nn.Sequential) -> Tensor:
    """Gives the first layer weights that bf16 holds and that FP8 needs no scale for."""
    weight: Any = model[0].weight
    with torch.no_grad():
        weight.copy_(rows(seed=3)[: weight.shape[0]])
    return weight.detach().clone()  # type: ignore[no-any-return]


def overrides(side: Side) -> Seen:
    seen: Seen = {}
    for asked in itertools.product((False, True), repeat=3):
        model = placed(linear())
        weight = unit_normal(model)
        prepared = side.prepare(model, "te", override_linear_precision=asked)
        seen[told(asked)] = told(high_precision_gemms(prepared, weight))
    return seen


def deepspeed(side: Side) -> Seen:
    prepared = side.deepspeed(placed(linear()), margin=3, amax_history_len=1)
    prepared.backward(mean_square(torch.ones(TOKENS, WIDTH, device=device())))
    return {"scale": prepared.scale("0"), "scale of margin 3": 448.0 / 8}


def sharded(side: Side) -> Seen:
    model = placed(linear())
    weight = unit_normal(model)
    prepared = side.sharded(model)
    return {
        # Not the root, whose class FSDP2 exchanges for its own.
        "converted": [name for name in prepared.changed_classes() if name],
        "gemms": told(high_precision_gemms(prepared, weight)),
    }


def torchao_trains(side: Side) -> Seen:
    model = placed(linear(), linear(), linear(), linear())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prepared = side.prepare(model, "torchao")
    for _ in range(3):
        prepared.train(mean_square(rows()))
    after = dict(prepared.model.named_parameters())
    plain = {name: _plain(after[name]) for name in before}
    seen: Seen = {
        "converted": prepared.changed_classes(),
        "weights without change": [n for n in before if torch.equal(plain[n], before[n])],
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepared.save(Path(folder))
            from safetensors.torch import load_file

            saved = load_file(Path(folder, "model.safetensors"))
            equal = all(torch.equal(saved[name], plain[name].cpu()) for name in plain)
            seen["saved as safetensors"] = "yes" if equal else "with other weights"
        except Exception as error:
            seen["saved as safetensors"] = f"{type(error).__name__}: {error}"
    return seen


def _plain(parameter: Any) -> Tensor:
    """The values of a Parameter that may be a tensor subclass around them."""
    inner: Tensor = getattr(parameter, "_tensor", parameter)
    return inner.detach()


def recomputation(side: Side) -> Seen:
    def gradient(recompute: bool) -> Tensor:
        prepared = side.prepare(llama(tie_word_embeddings=False), "te", amax_history_len=4)
        prepared.model.train()
        if recompute:
            prepared.recompute()
        for _ in range(2):  # the second pass casts with other scales than the first
            prepared.optimizer.zero_grad()
            prepared.backward(next_token)
        return first_gradient(prepared.model)

    model = llama(tie_word_embeddings=False).train()
    with torch.autocast(device().type, dtype=torch.bfloat16):
        loss = next_token(model)
    loss.backward()
    bf16, plain = first_gradient(model), gradient(recompute=False)
    return {
        "distance of a gradient from bf16's": relative_error(plain, bf16),
        "its change by recomputation": relative_error(gradient(recompute=True), plain),
    }


def first_gradient(model: nn.Module) -> Tensor:
    """The first layer's: a change anywhere in the recomputed blocks reaches it."""
    gradient = model.get_parameter("model.layers.0.self_attn.q_proj.weight").grad
    assert gradient is not None
    return gradient.detach()


PROBES = (
    Probe(
        "7a",
        "amax_compute_algo: most_recent cannot be had",
        "te",
        most_recent,
        lambda seen: seen["at work"] == seen["asked for"],
    ),
    Probe(
        "7b",
        "The documented default of amax_compute_algo is not the one at work",
        "te",
        default_algorithm,
        lambda seen: seen["at work"] == seen["documented"],
    ),
    Probe(
        "8a",
        "interval has no effect",
        "te",
        interval,
        lambda seen: seen["scale changed at updates"] == seen["should change at"],
    ),
    Probe(
        "8b",
        "override_linear_precision has no effect (F: FP8, H: high precision)",
        "te",
        overrides,
        lambda seen: all(asked == found for asked, found in seen.items()),
    ),
    Probe(
        "9",
        "With DeepSpeed the recipe is ignored",
        "te",
        deepspeed,
        lambda seen: seen["scale"] == seen["scale of margin 3"],
    ),
    Probe(
        "10",
        "With FSDP2 the converted layers run in bf16 (F: FP8, H: high precision)",
        "te",
        sharded,
        lambda seen: bool(seen["converted"]) and seen["gemms"] == "FFF",
        alone=True,
    ),
    Probe(
        "11",
        "torchao, default settings: converted weights are never trained, nor saved",
        "torchao",
        torchao_trains,
        lambda seen: (
            bool(seen["converted"])
            and not seen["weights without change"]
            and seen["saved as safetensors"] == "yes"
        ),
    ),
    Probe(
        "12",
        "Gradient checkpointing of a transformers model leaves FP8",
        "te",
        recomputation,
        # It is in FP8 that it was computed, and again: bf16 would be as far off the second time.
        lambda seen: (
            seen["distance of a gradient from bf16's"] > 0.02
            and seen["its change by recomputation"] < 0.005
        ),
    ),
)
