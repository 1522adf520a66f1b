"""Probes of what conversion does to a model, and of the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peers.fault_sides import Side
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
        "13",
        "Converting holds all weights twice",
        "te",
        memory,
        lambda seen: seen["converted"] == 8 and seen["extra memory / largest layer"] < 1.1,
        needs_gpu=True,
    ),
)
