r"""Training steps of LoRA adapters beside a frozen Llama, its blocks fused and not.

    python benchmarks/adapter_steps.py [--engines te,current,amp] [--targets all,qv] \
        [--bases bf16,fp8] [--rank 16] [--layers 8] [--rows 2] [--length 4096] [--steps 8] \
        [--small] [--out FILE]

Blocks of Llama-3.2-3B's widths, as few as ``--layers``, with a vocabulary of 32,000; base in bf16
or, of what te converts, in FP8 (``adapter.base_weights``), adapters in fp32 under autocast, put
around the layers as a job does. Forward and backward pass and PyTorch's fused AdamW. Prints the
median of the steps after three, the peak of memory, the last loss, and what is allocated before
the first step; then, for each choice of targets, the floor of such a step (`peers.floor`) and each
row's share of it. The file has each step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers.floor import floor, told
from peers.shapes import Shape
from peers.step_work import adapter_step
from timed_steps import gib, timed_steps

from fp8core import engines
from fp8core.conversion import convert
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion import PlannedAdapters, fused_inputs
from fp8core.fusion.cross_entropy import fused_cross_entropy, plain_cross_entropy
from fp8core.fusion.documents import attend_by_documents
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec import Conversion, parse_spec
from fp8core.training.adapter import attach
from fp8core.training.frozen_base import store_base

RECIPES: dict[str, dict[str, Any]] = {
    "te": {"engine": "te"},
    "current": {"engine": "te", "scaling": "current"},
    "amp": {"engine": "amp", "dtype": "bf16"},
}
TARGETS: dict[str, Any] = {"all": "linear", "qv": ["*.q_proj", "*.v_proj"]}
IN_BF16 = ("amp",)
VOCABULARY = 32000


@dataclass(frozen=True)
class Row:
    engine: str
    targets: str
    fuse: str
    base: str
    """What the frozen weights of converted layers lie in."""
    tokens_a_second: float
    milliseconds: tuple[float, ...]
    peak_gib: float | None
    rest_gib: float | None
    """Allocated before the first step."""
    loss: float
    fused: int
    """How many of the blocks are, wholly."""
    adapted: tuple[str, ...]
    """The kinds of Linears with an adapter, as q_proj."""


def shape_of(arguments: argparse.Namespace) -> Shape:
    if arguments.small:
        return Shape(64, 128, arguments.layers, heads=4, kv_heads=2, vocabulary=VOCABULARY)
    return Shape(3072, 8192, arguments.layers, heads=24, kv_heads=8, vocabulary=VOCABULARY)


def llama(arguments: argparse.Namespace, device: torch.device) -> Any:
    import transformers

    shape = shape_of(arguments)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=arguments.length,
        attn_implementation="sdpa",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with device:
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def batch_of(arguments: argparse.Namespace, device: torch.device) -> Batch:
    shape = (arguments.rows, arguments.length)
    ids = torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    places = torch.arange(arguments.length).expand(shape)
    documents = torch.zeros(shape, dtype=torch.int32)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORED
    count = ids.numel() - arguments.rows
    return Batch(ids, labels, None, places, documents, ids.numel(), count, True).to(device)


def measured(name: str, targets: str, fuse: str, base: str, arguments: argparse.Namespace) -> Row:
    device = torch.device("cpu" if arguments.small else "cuda")
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "emulated"} if arguments.small else RECIPES[name],
            "adapter": {"rank": arguments.rank, "target_modules": TARGETS[targets]},
        }
    )
    assert spec.adapter is not None
    engine, model = engines.create(spec.recipe, device), llama(arguments, device)
    layers = adapter_targets(model, spec.adapter)
    planned = PlannedAdapters(frozenset(layer.name for layer in layers), spec.adapter)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}), adapters=planned)
    attach(spec, model, layers)
    if base == "fp8":
        store_base(report, engine)
    if fuse == "none" and device.type == "cuda":
        refused = attend_by_documents(model, engine.evaluation_context, device, [])
        assert refused is None, refused
    found = fused_cross_entropy(device)
    loss_of: Any = plain_cross_entropy if isinstance(found, str) else found
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=not arguments.small)
    batch = batch_of(arguments, device)
    gc.collect()
    rest = None if arguments.small else torch.cuda.memory_allocated() / 2**30

    def loss_of_step() -> torch.Tensor:
        inputs = {**fused_inputs(model, batch, engine.compute_dtype), "use_cache": False}
        logits = model(**inputs).logits.view(-1, VOCABULARY)
        loss: torch.Tensor = loss_of(logits, batch.labels.view(-1)) / batch.target_count
        return loss

    kept, peak, loss = timed_steps(engine, optimizer, loss_of_step, arguments.steps)
    fusion = report.fusion
    return Row(
        name,
        targets,
        fuse,
        base,
        1000 * batch.input_ids.numel() / statistics.median(kept),
        tuple(round(each, 2) for each in kept),
        peak,
        rest,
        loss,
        0 if fusion is None else sum(row.reason is None for row in fusion.rows),
        tuple(sorted({layer.name.rpartition(".")[2] for layer in layers})),
    )


def floors(rows: list[Row], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By targets; prints each, and the rows' shares of it."""
    found = {}
    device = torch.device("cpu" if arguments.small else "cuda")
    for targets in dict.fromkeys(row.targets for row in rows):
        of_targets = [row for row in rows if row.targets == targets]
        least = adapter_step(
            shape_of(arguments),
            of_targets[0].adapted,
            arguments.rank,
            arguments.rows,
            arguments.length,
        )
        found[targets] = floor(least, device)
        print(f"floor, {targets}: {told(found[targets])}")
        for row in of_targets:
            share = found[targets]["bf16" if row.engine in IN_BF16 else "fp8"]
            share /= statistics.median(row.milliseconds)
            print(
                f"{row.engine:4} {targets:4} fuse {row.fuse:5} {share:.0%} of the floor, "
                f"base in {row.base}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default="te,amp")
    parser.add_argument("--targets", default="all,qv")
    parser.add_argument("--bases", default="bf16,fp8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, to try it")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    choices = itertools.product(
        arguments.engines.split(","),
        arguments.targets.split(","),
        ("none", "auto"),
        arguments.bases.split(","),
    )
    for name, targets, fuse, base in choices:
        if base == "fp8" and name in IN_BF16:
            continue
        row = measured(name, targets, fuse, base, arguments)
        rows.append(row)
        print(
            f"{name:4} {targets:4} fuse {fuse:5} {row.tokens_a_second:9.0f} tokens/s "
            f"{statistics.median(row.milliseconds):8.2f} ms {gib(row.peak_gib)}  "
            f"loss {row.loss:.4f}  {row.fused} blocks fused  base in {base}, "
            f"at rest {gib(row.rest_gib)}",
            flush=True,
        )
        write(rows, {}, arguments)
        gc.collect()
        if not arguments.small:
            torch.cuda.empty_cache()
    # Behind the rows: Transformer Engine is to find no cuDNN that PyTorch has loaded.
    write(rows, floors(rows, arguments), arguments)


def write(
    rows: list[Row], found: dict[str, dict[str, float]], arguments: argparse.Namespace
) -> None:
    if arguments.out is None:
        return
    asked = {key: value for key, value in vars(arguments).items() if key != "out"}
    together = {"arguments": asked, "rows": [asdict(row) for row in rows], "floors": found}
    arguments.out.write_text(json.dumps(together, indent=1) + "\n")


if __name__ == "__main__":
    main()
