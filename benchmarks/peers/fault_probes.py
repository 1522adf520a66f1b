"""The probes of `accelerate_faults`: what to do with a side, and when what was seen is right.

Each probe does one thing with a small model and writes down what it saw. Whether that is right is
decided by one function for both sides, from these observations alone.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fault_sides import Backend, Prepared, Side, device
from torch import Tensor, nn

Seen = dict[str, Any]
TOKENS, WIDTH = 64, 64
HIGH_PRECISION_BELOW = 0.01
"""Relative error of a product: bf16 rounds to about 0.003, an FP8 operand to about 0.03."""


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


# 1 to 6: conversion


def odd_layer_first(side: Side) -> Seen:
    model = placed(nn.Linear(10, 32), nn.Linear(32, 32), nn.LayerNorm(32))
    changed = side.prepare(model, "te").changed_classes()
    return {"converted": changed, "should be converted": ["1", "2"]}


def tied_head(side: Side) -> Seen:
    model = llama(tie_word_embeddings=True)
    prepared = side.prepare(model, "te", output_head=True)
    held = {id(p) for group in prepared.optimizer.param_groups for p in group["params"]}
    names = dict(prepared.model.named_parameters(remove_duplicate=False))
    outside = [name for name, p in names.items() if p.requires_grad and id(p) not in held]
    prepared.train(next_token)
    embedding, head = names["model.embed_tokens.weight"], names["lm_head.weight"]
    return {
        "head converted": "lm_head" in prepared.changed_classes(),
        "head equals embedding after a step": torch.equal(embedding, head),
        "trained, but not in the optimizer": outside,
    }


def frozen_layer(side: Side) -> Seen:
    model = placed(linear(), linear())
    model.get_submodule("1").requires_grad_(False)
    before = next(model[1].parameters()).detach().clone()
    # As most programs do; a parameter without a gradient is left alone by its step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared = side.prepare(model, "te", optimizer=optimizer)
    prepared.train(mean_square(rows()))
    weight: Any = prepared.model.get_submodule("1").weight
    return {
        "requires_grad": weight.requires_grad,
        "got a gradient": weight.grad is not None,
        "changed": not torch.equal(weight, before),
    }


def mode_and_hooks(side: Side) -> Seen:
    model = placed(linear(), linear()).eval()
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, inputs, output: calls.append(1))
    prepared = side.prepare(model, "te")
    modes = [module.training for module in prepared.model.modules()]
    prepared.model.train()
    prepared.backward(mean_square(rows()))
    return {
        "converted": prepared.changed_classes(),
        "modules that left eval mode": sum(modes),
        "calls of the hook in one pass": len(calls),
    }


def norm(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[Side], Seen]:
    def observe(side: Side) -> Seen:
        model = placed(linear(shape[-1], shape[-1]), make())
        before = {name: tuple(p.shape) for name, p in model.named_parameters()}
        x = rows(shape[-1] * (shape[0] if len(shape) == 2 else 1)).reshape(TOKENS, *shape)
        expected = model(x).detach()
        prepared = side.prepare(model, "te")
        after = {name: tuple(p.shape) for name, p in prepared.model.named_parameters()}
        got: list[Tensor] = []

        def loss(model: nn.Module) -> Tensor:
            got.append(model(x).float())
            return got[0].square().mean()

        prepared.backward(loss)
        error = relative_error(got[0].detach(), expected)
        return {
            "parameters gained": sorted(after.keys() - before.keys()),
            "parameters lost": sorted(before.keys() - after.keys()),
            # What is left is the Linear's FP8.
            "output error": round(error, 3),
        }

    return observe


def norm_is_right(seen: Seen) -> bool:
    return (
        not seen["parameters gained"] and not seen["parameters lost"] and seen["output error"] < 0.1
    )


def way_back(side: Side) -> Seen:
    model = placed(linear(), nn.LayerNorm(WIDTH))
    keys = list(model.state_dict())
    prepared = side.prepare(model, "te")
    prepared.train(mean_square(rows()))
    trained = [p.detach().clone() for p in prepared.model.parameters()]
    foreign_keys = sorted(set(prepared.model.state_dict()) - set(keys))
    plain, said = prepared.give_back()
    left = [name for name, m in plain.named_modules() if prepared.classes[name] is not type(m)]
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), trained, strict=True))
    return {
        "still converted": left,
        "foreign keys in the state dict": foreign_keys,
        "weights are the trained ones": same,
        **said,
    }


# 7 and 8: recipe fields


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


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def high_precision_gemms(prepared: Prepared, weight: Tensor) -> list[bool]:
    """Of fprop, dgrad and wgrad of the only Linear, which ran in high precision: by their errors.

    ``weight``: [out, in], as it was before the model was prepared.
    """
    x, gradient = rows().requires_grad_(), rows(seed=2)
    outputs: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        outputs.append(model(x))
        return (outputs[0].float() * gradient).sum()

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


# 9 to 13: ways to train


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
    def gradients(recompute: bool) -> tuple[list[str], list[Tensor]]:
        prepared = side.prepare(llama(tie_word_embeddings=False), "te", amax_history_len=4)
        prepared.model.train()
        if recompute:
            prepared.recompute()
        for _ in range(2):  # the second pass casts with other scales than the first
            prepared.optimizer.zero_grad()
            prepared.backward(next_token)
        grads = [p.grad.detach() for p in prepared.model.parameters() if p.grad is not None]
        return prepared.changed_classes(), grads

    converted, plain = gradients(recompute=False)
    _, recomputed = gradients(recompute=True)
    errors = [relative_error(a, b) for a, b in zip(recomputed, plain, strict=True)]
    return {"converted layers": len(converted), "largest change of a gradient": max(errors)}


def memory(side: Side) -> Seen:
    model = placed(*(nn.Linear(2048, 2048) for _ in range(8)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepared = side.prepare(model, "te")
    extra = torch.cuda.max_memory_allocated() - before
    return {
        "converted": len(prepared.changed_classes()),
        "extra memory / largest layer": round(extra / (weights / 8), 2),
        "extra memory / all weights": round(extra / weights, 2),
    }


PROBES = (
    Probe(
        "1",
        "A layer that cannot be converted ends the conversion of those after it",
        "te",
        odd_layer_first,
        lambda seen: seen["converted"] == seen["should be converted"],
    ),
    Probe(
        "2",
        "A tied output head becomes a copy that no optimizer knows",
        "te",
        tied_head,
        lambda seen: (
            seen["head converted"]
            and seen["head equals embedding after a step"]
            and not seen["trained, but not in the optimizer"]
        ),
    ),
    Probe(
        "3",
        "A frozen layer is no longer frozen",
        "te",
        frozen_layer,
        lambda seen: not any(seen.values()),
    ),
    Probe(
        "4",
        "Eval mode and hooks of converted layers are lost",
        "te",
        mode_and_hooks,
        lambda seen: (
            len(seen["converted"]) == 2
            and seen["modules that left eval mode"] == 0
            and seen["calls of the hook in one pass"] == 1
        ),
    ),
    Probe(
        "5a",
        "LayerNorm over two dimensions",
        "te",
        norm(lambda: nn.LayerNorm([4, 32]), (4, 32)),
        norm_is_right,
    ),
    Probe(
        "5b",
        "LayerNorm without weight and bias",
        "te",
        norm(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), (WIDTH,)),
        norm_is_right,
    ),
    Probe(
        "5c",
        "LayerNorm without bias gains one",
        "te",
        norm(lambda: nn.LayerNorm(WIDTH, bias=False), (WIDTH,)),
        norm_is_right,
    ),
    Probe(
        "6",
        "There is no way back to the plain model",
        "te",
        way_back,
        lambda seen: (
            not seen["still converted"]
            and not seen["foreign keys in the state dict"]
            and seen["weights are the trained ones"]
        ),
    ),
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
        # Recomputed in bf16, or with other scales, gradients differ by some hundredths.
        lambda seen: seen["converted layers"] > 0 and seen["largest change of a gradient"] < 0.005,
    ),
    Probe(
        "13",
        "Converting holds all weights twice",
        "te",
        memory,
        lambda seen: seen["converted"] == 8 and seen["extra memory / largest layer"] < 1.1,
        needs_gpu=True,
    ),
)
