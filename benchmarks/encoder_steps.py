r"""Training steps of an encoder with blocks as BERT's, its blocks fused and not.

    python benchmarks/encoder_steps.py [--engines amp,te] [--dropouts 0.1,0] [--rows 32] \
        [--length 512] [--steps 8] [--small] [--out FILE]

BERT-large by default: 24 layers of 1,024, 16 heads, GELU by the error function, parameters in fp32
under autocast, PyTorch's fused AdamW, batches of packed documents (six to a row), 15 % of the
tokens to be told. Prints tokens a second (median of the steps after three), the peak of memory and
the last loss; then the floor of such a step (`peers.floor`; its attention within documents that are
all of one length) and each row's share of it. ``rows`` in the file has each.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers.floor import floor, told
from peers.shapes import Shape
from peers.step_work import encoder_step
from timed_steps import gib, timed_steps
from torch import Tensor

from fp8core import engines
from fp8core.conversion import convert
from fp8core.data.batch import IGNORED, Batch
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import fused_cross_entropy, plain_cross_entropy
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.spec import Conversion, parse_spec

RECIPES: dict[str, dict[str, Any]] = {
    "amp": {"engine": "amp", "dtype": "bf16"},
    "te": {"engine": "te"},
}
DOCUMENTS, VOCABULARY = 6, 30522
IN_BF16 = ("amp",)


@dataclass(frozen=True)
class Row:
    engine: str
    fuse: str
    dropout: float
    tokens_a_second: float
    milliseconds: tuple[float, ...]
    peak_gib: float | None
    loss: float
    parameters: int


def shape_of(*, small: bool) -> Shape:
    if small:
        return Shape(64, 128, layers=2, heads=4, kv_heads=4, vocabulary=VOCABULARY)
    return Shape(1024, 4096, layers=24, heads=16, kv_heads=16, vocabulary=VOCABULARY)


def encoder(dropout: float, device: torch.device, *, small: bool) -> Any:
    import transformers

    shape = shape_of(small=small)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    with device:
        return transformers.BertForMaskedLM(config).train()


def batch_of(rows: int, length: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, VOCABULARY, (rows, length), generator=generator)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    for row in range(rows):
        for cut in torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1] + 1:
            documents[row, cut:] += 1
    bounds = document_bounds(documents)
    positions = Sequences(rows, length, bounds).positions(ids.device)
    told = torch.rand(ids.shape, generator=generator) < 0.15
    labels = ids.masked_fill(~told, IGNORED)
    ids = ids.masked_fill(told, 103)
    count = int(told.sum())
    return Batch(ids, labels, None, positions, documents, ids.numel(), count, False, bounds).to(
        device
    )


def measured(name: str, fuse: str, dropout: float, arguments: argparse.Namespace) -> Row:
    device = torch.device("cpu" if arguments.small else "cuda")
    recipe = {**RECIPES[name], "dtype": "fp32"} if arguments.small else RECIPES[name]
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "bert"}},
            "data": {"source": "builtin"},
            "recipe": recipe,
        }
    )
    engine = engines.create(spec.recipe, device)
    model = encoder(dropout, device, small=arguments.small)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
    if fuse == "auto" and not arguments.small:
        assert report.fusion is not None
        reasons = {row.reason for row in report.fusion.rows}
        assert reasons == {None}, reasons
    found = fused_cross_entropy(device)
    loss_of = plain_cross_entropy if isinstance(found, str) else found
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not arguments.small)
    batch = batch_of(arguments.rows, arguments.length, device)

    def loss_of_step() -> Tensor:
        logits: Tensor = model(**fused_inputs(model, batch, engine.compute_dtype)).logits
        return loss_of(logits.view(-1, VOCABULARY), batch.labels.view(-1)) / batch.target_count

    kept, peak, loss = timed_steps(engine, optimizer, loss_of_step, arguments.steps)
    return Row(
        name,
        fuse,
        dropout,
        1000 * batch.input_ids.numel() / statistics.median(kept),
        tuple(round(each, 2) for each in kept),
        peak,
        loss,
        sum(parameter.numel() for parameter in model.parameters()),
    )


def shares(rows: list[Row], arguments: argparse.Namespace) -> dict[str, float]:
    """The floor; prints it, and the rows' shares of it."""
    bounds = batch_of(arguments.rows, arguments.length, torch.device("cpu")).document_bounds
    assert bounds is not None
    least = encoder_step(
        shape_of(small=arguments.small),
        arguments.rows,
        arguments.length,
        bounds.diff().tolist(),
        rows[0].parameters,
    )
    found = floor(least, torch.device("cpu" if arguments.small else "cuda"))
    print(f"floor: {told(found)}")
    for row in rows:
        share = found["bf16" if row.engine in IN_BF16 else "fp8"]
        share /= statistics.median(row.milliseconds)
        print(f"{row.engine:4} fuse {row.fuse:4} dropout {row.dropout:g}: {share:.0%} of the floor")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    # Transformer Engine first: behind PyTorch's own use of cuDNN it may find another one loaded.
    parser.add_argument("--engines", default="te,amp")
    parser.add_argument("--dropouts", default="0.1,0")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, to try it")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for dropout in map(float, arguments.dropouts.split(",")):
        for name in arguments.engines.split(","):
            for fuse in ("none", "auto"):
                row = measured(name, fuse, dropout, arguments)
                rows.append(row)
                print(
                    f"{name:4} fuse {fuse:4} dropout {dropout:g}: {row.tokens_a_second:9,.0f} tok/s"
                    f"  {gib(row.peak_gib)}  loss {row.loss:.3f}",
                    flush=True,
                )
                write(rows, {}, arguments.out)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    write(rows, shares(rows, arguments), arguments.out)


def write(rows: list[Row], found: dict[str, float], out: Path | None) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": [asdict(each) for each in rows], "floor": found}, indent=1))


if __name__ == "__main__":
    main()
