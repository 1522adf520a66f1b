"""Errors and biases of gradients, by groups of parameters, and of an optimizer's steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from te_by_hand import BETAS, EPSILON, LEARNING_RATE
from torch import Tensor, nn

from fp8core.training.optimizer import AdamW, clip_factor, global_norm

__all__ = [
    "Gradients",
    "compare",
    "compare_optimizers",
    "compare_scales",
    "mean_and_error",
    "show",
]

GROUPS = {
    "embedding": ("embed_tokens",),
    "norms": ("norm",),
    "q and k": ("q_proj", "k_proj"),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}
Gradients = dict[str, Tensor]


def group_of(name: str) -> str:
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return next(g for g, ends in GROUPS.items() if any(layer.endswith(end) for end in ends))


def compare(own: Sequence[Gradients], other: Sequence[Gradients]) -> dict[str, dict[str, float]]:
    """Error and bias of ``own`` to ``other`` by group of parameters, and of all together."""
    figures: dict[str, dict[str, float]] = {}
    of_batches = [compare_one(*pair) for pair in zip(own, other, strict=True)]
    for group in (*GROUPS, "all"):
        errors, biases = zip(*(found[group] for found in of_batches), strict=True)
        bias, uncertain = mean_and_error(biases)
        error, _ = mean_and_error(errors)
        figures[group] = {"error": error, "bias": bias, "bias_standard_error": uncertain}
    return figures


def compare_one(own: Gradients, other: Gradients) -> dict[str, tuple[float, float]]:
    if own.keys() != other.keys():
        raise SystemExit(f"other parameters: {sorted(own.keys() ^ other.keys())[:4]}")
    sums = {group: torch.zeros(3, dtype=torch.float64) for group in (*GROUPS, "all")}
    for name, reference in other.items():
        mine, apart = own[name].flatten(), (own[name] - reference).flatten()
        reference = reference.flatten()
        products = torch.stack([apart @ apart, mine @ reference, reference @ reference])
        for group in (group_of(name), "all"):
            sums[group] += products.cpu()
    return {group: _relative(*found.tolist()) for group, found in sums.items()}


def _relative(apart: float, along: float, size: float) -> tuple[float, float]:
    if size == 0:  # where all gradients of a group have underflowed
        return (math.inf if apart else 0.0), 0.0
    return math.sqrt(apart / size), along / size - 1


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """The mean, and its standard error (0 of a single value)."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    count = tensor.numel()
    return float(tensor.mean()), float(tensor.std() / count**0.5) if count > 1 else 0.0


def show(title: str, ways: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    print(f"\n{title}: error | bias")
    print(f"{'':12}" + "".join(f"{name:>31}" for name in ways))
    for group in (*GROUPS, "all"):
        cells = [
            "{error:8.3%} |{bias:8.3%} ±{bias_standard_error:7.3%}".format(**found[group])
            for found in ways.values()
        ]
        print(f"{group:12}" + "".join(f"{cell:>31}" for cell in cells), flush=True)


def compare_scales(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest ratio of two scales of the same tensor, less 1, by tensor."""
    columns = {"fwd": ("input", "weight"), "bwd": ("grad_output",)}
    worst: dict[str, float] = {}
    for key, theirs in other.items():
        name, _, direction = key.rpartition("/")
        for place, tensor in enumerate(columns[direction]):
            ratio = abs(math.log(float(own[key][place]) / float(theirs[place])))
            what = f"{name.rpartition('.')[2]}/{tensor}"
            worst[what] = max(worst.get(what, 0.0), math.exp(ratio) - 1)
    return worst


def compare_optimizers(
    initial: Gradients, gradients: Sequence[Gradients]
) -> dict[str, dict[str, float]]:
    """How far Octrain's and PyTorch's clipping and AdamW are from fp64, after 1 and all steps.

    Relative to how far the weights have moved from ``initial``, in 2-norm. Clipping to half the
    first norm.
    """
    longest = float(global_norm(list(gradients[0].values()))) / 2
    own = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
    theirs, exact = copy.deepcopy(own), {n: nn.Parameter(v.double()) for n, v in initial.items()}
    options: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON}
    ours = AdamW(own.items(), decayed=set(), weight_decay=0.0, **options)
    by_pytorch = torch.optim.AdamW(theirs.values(), weight_decay=0.0, foreach=True, **options)
    in_fp64 = torch.optim.AdamW(exact.values(), weight_decay=0.0, foreach=True, **options)
    figures: dict[str, dict[str, float]] = {}
    for step, given in enumerate(gradients, start=1):
        for parameters in (own, theirs, exact):
            for name, parameter in parameters.items():
                parameter.grad = given[name].to(parameter.dtype, copy=True)
        norm = global_norm([p.grad for p in own.values() if p.grad is not None])
        ours.step(factor=clip_factor(norm, longest))
        for parameters, optimizer in ((theirs, by_pytorch), (exact, in_fp64)):
            nn.utils.clip_grad_norm_(parameters.values(), longest)
            optimizer.step()
        if step in (1, len(gradients)):
            figures[f"after {step}"] = {
                "octrain": moved_apart(own, exact, initial),
                "pytorch": moved_apart(theirs, exact, initial),
                "octrain to pytorch": moved_apart(own, theirs, initial),
            }
            print(f"AdamW and clipping after {step}: {figures[f'after {step}']}", flush=True)
    return figures


def moved_apart(
    own: Mapping[str, nn.Parameter], other: Mapping[str, nn.Parameter], since: Gradients
) -> float:
    """|own - other| / |other - since|, of all parameters together."""
    apart = moved = 0.0
    with torch.no_grad():
        for name, begin in since.items():
            apart += float((own[name].double() - other[name].double()).square().sum())
            moved += float((other[name].double() - begin.double()).square().sum())
    return math.sqrt(apart / moved)
