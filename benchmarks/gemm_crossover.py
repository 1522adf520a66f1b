"""From which sizes on FP8 is faster than bf16 on this card: one layer, forward, dgrad and wgrad.

    python benchmarks/gemm_crossover.py --out fp8core/measured/NAME.json
        [--kinds linear,norm_linear,norm_mlp] [--scalings delayed,current,block]
        [--tokens 2048,4096,8192,16384] [--seconds 60] [--graphed] [--dry-run]

Times every layer as it trains: the engine's own layers in the engine's own contexts, casts, amaxes
and what the host needs to enqueue them among it, eight layers at a time. The other side is what
PyTorch and transformers compute in bf16 without Transformer Engine:

    linear       a Linear of in to out features
    norm_linear  an RMSNorm and three Linears, out features together (query, key, value)
    norm_mlp     an RMSNorm, and a gated MLP of in features with out inner ones

Weights are bf16. Microseconds are of one layer: median of the iterations, between events on the
device's own clock, so that a host that is too slow shows. ``*_host``: what enqueuing took.
``--graphed`` adds to the rows of the file those of steps that are replayed as a CUDA graph, where
the host is no limit: ``bf16_graphed`` and so on. There bf16 is fused too, as such steps are.
The file is what the small-GEMM rule of `fp8core.conversion` reads, by the card's name.
``--dry-run`` goes the same ways on a CPU with `emulated`, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from row_files import write_rows
from torch import Tensor, nn

from fp8core.conversion.norms import describe_norm
from fp8core.engines import create
from fp8core.engines.amp import AmpEngine
from fp8core.engines.protocol import Engine, NormDescription
from fp8core.fusion.joined import lay_together
from fp8core.fusion.parts import BlockParts, FusingEngine, MLPHalf, NamedLinear
from fp8core.spec.recipe import AmpRecipe, EmulatedDelayed, Recipe, TEBlock, TECurrent, TEDelayed

LAYERS = 8
WIDTHS = (768, 1024, 2048, 4096)
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "linear": (WIDTHS, WIDTHS),
    "norm_linear": (WIDTHS, (1536, 3072, 6144)),
    "norm_mlp": (WIDTHS, (2048, 4096, 8192)),
}
TOKENS = (2048, 4096, 8192, 16384)
DRY_WIDTHS, DRY_TOKENS = (32, 64), (16, 32)
RECIPES: dict[str, Recipe] = {
    "delayed": TEDelayed(amax_history_len=16),
    "current": TECurrent(scaling="current"),
    "block": TEBlock(scaling="block"),
    "emulated": EmulatedDelayed(engine="emulated"),
}


@dataclass(frozen=True)
class Layer:
    """What is called (it gives one tensor or several), and the Parameters it has gradients of."""

    call: Callable[[Tensor], Any]
    parameters: list[nn.Parameter]


@dataclass(frozen=True)
class Place:
    device: torch.device
    dtype: torch.dtype


def plain_modules(kind: str, width: int, out: int, place: Place) -> tuple[nn.Module, ...]:
    """The norm, where there is one, and the Linears of one layer."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, device=place.device, dtype=place.dtype)

    if kind == "linear":
        return (linear(width, out),)
    norm = LlamaRMSNorm(width).to(place.device, place.dtype)
    if kind == "norm_mlp":
        return norm, linear(width, out), linear(width, out), linear(out, width)
    return norm, *(linear(width, part) for part in (out // 2, out // 4, out // 4))


def linears_among(modules: tuple[nn.Module, ...]) -> list[nn.Linear]:
    return [module for module in modules if isinstance(module, nn.Linear)]


def plain_layer(kind: str, modules: tuple[nn.Module, ...]) -> Layer:
    parameters = [p for module in modules for p in module.parameters()]
    if kind == "linear":
        return Layer(modules[0], parameters)
    if kind == "norm_mlp":
        norm, gate, up, down = modules

        def mlp(x: Tensor) -> Tensor:
            normal = norm(x)
            output: Tensor = down(nn.functional.silu(gate(normal)) * up(normal))
            return output

        return Layer(mlp, parameters)
    norm, *linears = modules

    def projections(x: Tensor) -> list[Tensor]:
        normal = norm(x)
        return [linear(normal) for linear in linears]

    return Layer(projections, parameters)


def engine_layer(
    kind: str, modules: tuple[nn.Module, ...], engine: Engine, parts: BlockParts | None, name: str
) -> Layer:
    """As conversion and fusion make it."""
    parameters = [p for module in modules for p in module.parameters()]
    if kind == "linear" and isinstance(engine, AmpEngine):
        return Layer(modules[0], parameters)
    if kind == "linear":
        (linear,) = linears_among(modules)
        return Layer(engine.convert_linear(linear, name), parameters)
    assert parts is not None
    described = describe_norm(modules[0])
    assert isinstance(described, NormDescription)
    names = ("q", "k", "v") if kind == "norm_linear" else ("gate", "up", "down")
    linears = [
        NamedLinear(f"{name}.{part}", linear)
        for part, linear in zip(names, linears_among(modules), strict=True)
    ]
    if kind == "norm_linear":
        lay_together([linear.parameter for linear in linears])
        return Layer(parts.norm_linear(described, linears, name), parameters)
    gate, up, down = linears
    lay_together([gate.parameter, up.parameter])
    half = MLPHalf(name, described, f"{name}.norm", (gate, up), down, "swiglu")
    return Layer(parts.norm_mlp(half), parameters)


def step_of(
    layers: Sequence[Layer], engine: Engine, x: Tensor, along: Tensor
) -> Callable[[], None]:
    """Forward and backward of all layers, each of the same input."""
    inputs = [x.detach().requires_grad_() for _ in layers]
    gradients: dict[int, Tensor] = {}

    def step() -> None:
        outputs: list[Tensor] = []
        with engine.training_context():
            for layer, given in zip(layers, inputs, strict=True):
                left = layer.call(given)
                outputs += left if isinstance(left, list) else [left]
        for output in outputs:
            if output.shape[-1] not in gradients:
                gradients[output.shape[-1]] = along[..., : output.shape[-1]].contiguous()
        torch.autograd.backward(outputs, [gradients[output.shape[-1]] for output in outputs])
        engine.after_backward()
        for given in inputs:
            given.grad = None
        for layer in layers:
            for parameter in layer.parameters:
                parameter.grad = None

    return step


def times(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Microseconds of a step, and those in which the host enqueued it."""
    began = time.perf_counter()
    step()
    _wait(device)
    step()
    _wait(device)
    count = 3 if time.perf_counter() - began > 0.1 else 6
    marks, hosts = [_mark(device)], []
    for _ in range(count):
        before = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - before)
        marks.append(_mark(device))
    _wait(device)
    # The first begins with an empty queue.
    spans = [_microseconds(a, b) for a, b in pairwise(marks)][1:]
    return statistics.median(spans), statistics.median(hosts) * 1e6


def replayed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as a CUDA graph; on a CPU the step."""
    if device.type != "cuda":
        return step
    step()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _microseconds(a: Any, b: Any) -> float:
    return float((b - a) * 1e6 if isinstance(a, float) else a.elapsed_time(b) * 1e3)


def measure(
    kind: str,
    width: int,
    out: int,
    tokens: Sequence[int],
    scalings: Sequence[str],
    place: Place,
    graphed: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens; a scaling that refuses the shape has none of its times."""
    rows: list[dict[str, Any]]
    rows = [{"kind": kind, "tokens": n, "in": width, "out": out} for n in tokens]
    given = {n: torch.randn(1, n, width, device=place.device, dtype=place.dtype) for n in tokens}
    leaving = width if kind == "norm_mlp" else out
    along = torch.randn(1, max(tokens), leaving, device=place.device, dtype=place.dtype)
    for name in ("bf16", *scalings):
        fp8 = name != "bf16"
        engine: Engine
        engine = (
            create(RECIPES[name], place.device)
            if fp8
            else AmpEngine(AmpRecipe(engine="amp"), place.device)
        )
        made = [plain_modules(kind, width, out, place) for _ in range(LAYERS)]
        try:
            if fp8 or graphed:
                parts = _parts(engine, place)
                layers = [
                    engine_layer(kind, modules, engine, parts, f"layer{index}")
                    for index, modules in enumerate(made)
                ]
            else:
                layers = [plain_layer(kind, modules) for modules in made]
            for row in rows:
                count = row["tokens"]
                step = step_of(layers, engine, given[count], along[:, :count].contiguous())
                if graphed:
                    step = replayed(step, place.device)
                of_all, host = times(step, place.device)
                if graphed:
                    row[f"{name}_graphed"] = round(of_all / LAYERS, 1)
                else:
                    row[name] = round(of_all / LAYERS, 1)
                    row[f"{name}_host"] = round(host / LAYERS, 1)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:200]
            print(f"{kind} {width} to {out}, {name}: {type(error).__name__}: {text}", flush=True)
    yield from rows


def _parts(engine: Engine, place: Place) -> BlockParts:
    if isinstance(engine, FusingEngine) and place.device.type == "cuda":
        return engine.block_parts()
    from fp8core.fusion.plain import PlainParts

    return PlainParts()


def head(place: Place, date: str) -> dict[str, Any]:
    versions = {"torch": str(torch.__version__)}
    card = "cpu"
    if place.device.type == "cuda":
        import transformer_engine

        card = torch.cuda.get_device_name()
        versions["transformer_engine"] = str(transformer_engine.__version__)
        versions["cuda"] = str(torch.version.cuda)
    return {
        "format": 1,
        "card": card,
        "date": date,
        "command": shlex.join(["python", "benchmarks/gemm_crossover.py", *sys.argv[1:]]),
        "versions": versions,
        "unit": "microseconds of one layer: forward, dgrad, wgrad, casts",
    }


def joined(known: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``known`` with what ``rows`` have more, by what they are of."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (*known, *rows):
        place = tuple(row[key] for key in ("kind", "tokens", "in", "out"))
        found[place] = found.get(place, {}) | row
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(SHAPES))
    parser.add_argument("--scalings", default="delayed,current,block")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=600, help="begin no shape after so many")
    parser.add_argument("--out", type=Path, help="where the table goes")
    parser.add_argument("--graphed", action="store_true", help="add steps replayed as CUDA graphs")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    chosen = parser.parse_args()
    dry = chosen.dry_run
    place = Place(torch.device("cpu" if dry else "cuda"), torch.float32 if dry else torch.bfloat16)
    tokens = DRY_TOKENS if dry else [int(part) for part in chosen.tokens.split(",")]
    scalings = ["emulated"] if dry else chosen.scalings.split(",")
    graphed = chosen.graphed
    facts = head(place, datetime.datetime.now(datetime.UTC).date().isoformat())
    known: list[dict[str, Any]] = []
    if graphed and chosen.out is not None:
        table = json.loads(chosen.out.read_bytes())
        known = table.pop("rows")
        facts = {**table, "graphed": {key: facts[key] for key in ("date", "command", "versions")}}
    deadline = time.monotonic() + chosen.seconds
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for kind in chosen.kinds.split(","):
        widths, outs = (DRY_WIDTHS, DRY_WIDTHS) if dry else SHAPES[kind]
        for width, out in ((w, o) for w in widths for o in outs):
            if time.monotonic() > deadline:
                print(f"left out for want of time: {kind} {width} to {out}")
                continue
            for row in measure(kind, width, out, tokens, scalings, place, graphed):
                rows.append(row)
                columns = [f"{name}{'_graphed' * graphed}" for name in ("bf16", *scalings)]
                said = ", ".join(f"{key} {row[key]}" for key in columns if key in row)
                print(f"{kind} {row['tokens']} x {width} to {out}: {said}", flush=True)
        if chosen.out is not None:
            write_rows(chosen.out, facts, joined(known, rows))


if __name__ == "__main__":
    main()
