"""Between two steps nobody asks the device for a number: on a GPU the host would wait for it.

Here reads are counted on a CPU, in PyTorch's dispatcher; on a GPU PyTorch itself reports waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import engines
from fp8core.data.batch import Batch
from fp8core.fusion.documents import switch_to_documents
from fp8core.fusion.fuse import HELD, ModelFusion
from fp8core.training.assemble import Assembled
from fp8core.training.learner import Learner
from tests.fp8core.fusion.test_runs import BERT, RUN, FusingAmp
from tests.fp8core.training.conftest import job, train_here

__all__ = ["job", "train_here"]  # fixtures

READS = frozenset(
    (
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Of aten: what gives the host a number, or a tensor whose size hangs on numbers."""


class Reads(TorchDispatchMode):
    """The names of `READS` that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's has no types
        self.names = list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.partition(".")[0]
        if name in READS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def reads_of(learner: Learner, batches: list[Batch], step: int) -> list[str]:
    """Those of one step as the loop takes it, from its batches on the host to the update."""
    totals = learner.totals(step, batches)
    reads = Reads()
    with reads:
        loss = learner.gradients(step, batches, totals=totals)
        norm = learner.gradient_norm()
        bad = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        learner.update(step, norm, unless=bad)
    return reads.names


@contextmanager
def trained(
    job: Callable[..., Path], train_here: Callable[..., Any], **parts: Any
) -> Iterator[tuple[Learner, list[list[Batch]]]]:
    """The learner of a run, and the batches of its steps."""
    learners: list[Learner] = []
    steps: list[list[Batch]] = []

    def plant(assembled: Assembled) -> None:
        learner = assembled.learner
        learners.append(learner)
        own = learner.gradients

        def gradients(step: int, batches: list[Batch], **options: Any) -> Tensor:
            steps.append(batches)
            return own(step, batches, **options)

        learner.gradients = gradients  # type: ignore[assignment,method-assign]

    train_here(job(**parts), plant=plant)
    yield learners[0], steps


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, runs get an engine that fuses blocks all the same."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(engines, "create", FusingAmp)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts reads on a CPU")
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("fp32", "method"),
        ("bf16", "throughput"),
        ("bf16", "memory"),
        ("bf16", {"preset": "memory", "master_weights": "fp32"}),
    ],
)
def test_a_step_reads_no_number(
    dtype: str,
    precision: Any,
    fuse: str,
    packing: bool,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
) -> None:
    parts = {
        **RUN,
        "recipe": {"engine": "amp", "dtype": dtype},
        "training": {**RUN["training"], "precision": precision},
        "conversion": {"fuse": fuse},
        "data": {"source": "builtin", "packing": packing},
    }
    with trained(job, train_here, **parts) as (learner, steps):
        assert isinstance(learner.engine, FusingAmp)
        if fuse == "none":
            # As is done on a GPU; with masks transformers asks whether they hide anything.
            assert switch_to_documents(learner.model, nullcontext, learner.engine.device) is None
        fusion: ModelFusion | None = learner.model.__dict__.get(HELD)
        assert (fusion is not None and fusion.whole) == (fuse == "auto")
        assert all(batch.packed == packing for batch in steps[0])
        for step, batches in enumerate(steps[:2], start=1):
            assert len(batches) == 2  # accumulated
            assert reads_of(learner, batches, step) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts reads on a CPU")
@pytest.mark.parametrize("packing", [True, False])
def test_a_step_of_an_encoder_reads_no_number(
    packing: bool, job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    """Where its padding begins is counted with the data, as where documents do."""
    parts = {
        **RUN,
        "task": "masked_lm",
        "model": {"source": "config", "config": BERT},
        "data": {"source": "builtin", "packing": packing},
    }
    with trained(job, train_here, **parts) as (learner, steps):
        fusion: ModelFusion | None = learner.model.__dict__.get(HELD)
        assert fusion is not None
        assert fusion.whole
        assert not fusion.causal
        for step, batches in enumerate(steps[:2], start=1):
            assert reads_of(learner, batches, step) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts reads on a CPU")
def test_a_read_would_be_seen(job: Callable[..., Path], train_here: Callable[..., Any]) -> None:
    """Bounds that the data did not count are found on the device, which says how many there are."""
    with trained(job, train_here, **RUN, data={"source": "builtin", "packing": True}) as (
        learner,
        steps,
    ):
        uncounted = [replace(batch, document_bounds=None) for batch in steps[0]]
        assert set(reads_of(learner, uncounted, 1)) == {"nonzero"}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("engine", ["amp", "te"])
def test_a_step_waits_for_nothing_on_a_gpu(
    engine: str, window: int | None, job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    """The whole loop, its figures a step late, FP8 health with them."""
    recipe: Any = {"engine": engine}
    found = engines.availability(_recipe(recipe), torch.device("cuda"))
    if not found.ok:
        pytest.skip("; ".join(found.reasons))
    taken: list[int] = []

    def plant(assembled: Assembled) -> None:
        learner = assembled.learner
        own_gradients, own_update = learner.gradients, learner.update

        def gradients(step: int, *arguments: Any, **options: Any) -> Tensor:
            # The first steps compile kernels, and measure what the precision table says.
            torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
            return own_gradients(step, *arguments, **options)

        def update(step: int, norm: Tensor, **options: Any) -> None:
            own_update(step, norm, **options)
            torch.cuda.set_sync_debug_mode("default")
            taken.append(step)

        learner.gradients = gradients  # type: ignore[method-assign]
        learner.update = update  # type: ignore[method-assign]

    config: dict[str, Any] = {
        "model_type": "llama" if window is None else "mistral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "attention_dropout": 0.0,
    }
    if window is not None:
        config["sliding_window"] = window
    try:
        for packing in (True, False):
            spec = job(
                recipe=recipe,
                model={"source": "config", "config": config},
                training={"steps": 6, "batch_size": 2, "sequence_length": 64},
                conversion={"small_gemm": "off"},
                data={"source": "builtin", "packing": packing},
                telemetry={"fp8_every_steps": 2},
                evaluation={"every_steps": 0, "fraction": 0.0},
                checkpoint={"every_steps": 0, "final": False},
                resources={"device": "cuda"},
            )
            train_here(spec, plant=plant)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == [1, 2, 3, 4, 5, 6] * 2


def _recipe(fields: dict[str, Any]) -> Any:
    from fp8core.spec import parse_spec

    return parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": fields,
        }
    ).recipe
