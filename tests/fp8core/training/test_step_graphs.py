"""Steps whose gradients are replayed: with a graph's stand-in on a CPU, a tape of operations."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core import engines
from fp8core.conversion import ConversionReport
from fp8core.data.batch import IGNORED, Batch
from fp8core.engines.amp import AmpEngine
from fp8core.engines.te_health import HealthRecorder, cast_rules
from fp8core.fusion import ModelFusion, fuse
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.numerics.landing import Landing
from fp8core.spec import AmpRecipe, JobSpec, parse_spec
from fp8core.spec.recipe import TEDelayed
from fp8core.spec.step_graphs import graph_refusal as of_spec
from fp8core.training import gradient_graph, step_graphs
from fp8core.training.assemble import Assembled
from fp8core.training.gradient_graph import GradientGraph, shape_of
from fp8core.training.late_metrics import LateMetrics
from fp8core.training.learner import Learner
from fp8core.training.optimizer import AdamW
from fp8core.training.outcome import RunResult
from fp8core.training.step_graphs import StepGraphs
from fp8core.training.tasks import create_task
from tests.fp8core.fusion.berts import bert
from tests.fp8core.fusion.test_runs import FusingAmp
from tests.fp8core.training.tape import Tape, taped

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
Telemetry = Callable[[Path], list[dict[str, Any]]]

RUN: dict[str, Any] = {
    "recipe": {"engine": "amp", "dtype": "fp32"},
    "model": {"source": "config", "config": {"attention_dropout": 0.0}},
    "training": {"steps": 24},
    "evaluation": {"every_steps": 10, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 7},
}
OFF = {**RUN, "training": {**RUN["training"], "cuda_graphs": "off"}}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """Runs on a CPU may replay, with tapes, and count as limited by the host; one for each run."""
    made: list[StepGraphs] = []

    class Taped(StepGraphs):
        def __init__(self, refusal: str | None, learner: Learner, *others: Any) -> None:
            off = "training.cuda_graphs is off"
            kept = refusal if refusal == off else None
            super().__init__(kept, learner, others[0], lambda: 99, taped)
            made.append(self)

    monkeypatch.setattr("fp8core.training.loop.StepGraphs", Taped)
    fp32 = AmpRecipe(engine="amp", dtype="fp32")
    monkeypatch.setattr(engines, "create", lambda recipe, device: FusingAmp(fp32, device))
    return made


def events(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def report_of(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workdir / "report.json").read_bytes())["cuda_graphs"]
    return found


def test_a_run_that_replays_is_the_run_that_does_not(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    telemetry: Telemetry,
) -> None:
    """Schedule, clipping, evaluation, health and documents of all lengths: the same to the bit."""
    _, plain = train_here(job(**OFF))
    _, replayed = train_here(job(**RUN))
    for name in ("train/loss", "train/grad_norm", "train/lr", "eval/loss"):
        expected = series(plain, name)
        assert expected
        assert series(replayed, name) == expected, name
    # Behind three batches.
    assert report_of(replayed) == {"from_step": 4, "replayed_steps": 21, "reason": None}
    (event,) = events(telemetry(replayed), "step_graphed")
    assert event["data"] == {"step": 4}
    off = report_of(plain)
    assert (off["replayed_steps"], off["reason"]) == (0, "training.cuda_graphs is off")
    assert not events(telemetry(plain), "step_graphed")
    assert not events(telemetry(plain), "step_not_graphed")


class WatchedAmp(FusingAmp):
    """Counts what casts to FP8 would do to the head's tensors."""

    records_health = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scale = torch.tensor(30.0)
        self._recorder = HealthRecorder(self._scales, cast_rules(TEDelayed()), self.device)
        self._head: nn.Module | None = None

    def _scales(self) -> dict[tuple[str, str], Tensor]:
        return {("head", tensor): self._scale for tensor in ("input", "weight", "grad_output")}

    def prepare(self, model: nn.Module) -> None:
        self._head = model.lm_head

    @contextmanager
    def training_context(self, *arguments: Any) -> Iterator[None]:
        self._recorder.before_forward()
        with super().training_context(*arguments):
            yield

    def record_health(self, enabled: bool) -> None:
        assert self._head is not None
        self._recorder.record(enabled, {"head": self._head})

    def health_later(self) -> Callable[[], dict[str, float]]:
        read = self._recorder.read_later({})
        assert read is not None
        self._scale.add_(10.0)  # as delayed scaling has it, the next casts go by another
        return read

    def captured_health(self) -> Any:
        return self._recorder.recorded()

    def replayed(self, health: Any = None) -> None:
        if health is not None:
            self._recorder.replayed(health)


def test_recorded_steps_are_replayed_too(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their figures are those of steps that were not: of their own tensors, and of their scales."""
    fp32 = AmpRecipe(engine="amp", dtype="fp32")
    monkeypatch.setattr(engines, "create", lambda recipe, device: WatchedAmp(fp32, device))
    _, plain = train_here(job(**OFF))
    _, replayed = train_here(job(**RUN))
    for tensor in ("input", "weight", "grad_output"):
        for figure in ("amax", "scale", "saturated", "underflow"):
            name = f"fp8/head/{tensor}/{figure}"
            expected = series(plain, name)
            assert expected.keys() == {7, 14, 21}
            assert series(replayed, name) == expected, name
        assert len(set(series(plain, f"fp8/head/{tensor}/amax").values())) == 3
    assert series(plain, "fp8/head/input/scale") == {7: 30.0, 14: 40.0, 21: 50.0}
    assert series(replayed, "train/loss") == series(plain, "train/loss")
    # Behind three batches, and behind the first that was recorded.
    assert report_of(replayed) == {"from_step": 4, "replayed_steps": 20, "reason": None}


def test_a_capture_that_fails_costs_the_run_nothing(
    graphs: list[StepGraphs],
    job: Job,
    train_here: TrainHere,
    series: Series,
    telemetry: Telemetry,
) -> None:
    def plant(assembled: Assembled) -> None:
        learner = assembled.learner
        computed, compute = 0, learner.forward_backward

        def failing(*arguments: Any, **options: Any) -> Tensor:
            nonlocal computed
            computed += 1
            loss = compute(*arguments, **options)
            if computed == 4:
                raise RuntimeError("operation not permitted when stream is capturing")
            return loss

        learner.forward_backward = failing  # type: ignore[method-assign]

    _, plain = train_here(job(**OFF))
    _, failed = train_here(job(**RUN), plant=plant)
    assert series(failed, "train/loss") == series(plain, "train/loss")
    found = report_of(failed)
    assert found["replayed_steps"] == 0
    assert "operation not permitted" in found["reason"]
    (event,) = events(telemetry(failed), "step_not_graphed")
    assert event["data"] == {"step": 4, "reason": found["reason"]}


def batch(seed: int, documents: int, length: int = 64) -> Batch:
    """Two rows, each of ``documents``."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (2, length), generator=drawn)
    owners = torch.zeros(2, length, dtype=torch.int32)
    for row in range(2):
        for cut in torch.randperm(length - 1, generator=drawn)[: documents - 1] + 1:
            owners[row, cut:] += 1
    bounds = document_bounds(owners)
    labels = ids.clone()
    labels.view(-1)[bounds[:-1].long()] = IGNORED
    positions = Sequences(2, length, bounds).positions(ids.device)
    count = int((labels != IGNORED).sum())
    return Batch(ids, labels, None, positions, owners, ids.numel(), count, True, bounds)


@pytest.fixture
def learner(graphs: list[StepGraphs], job: Job, train_here: TrainHere) -> Learner:
    """Of fused blocks, a step old."""
    made: list[Learner] = []
    spec = job(**{**RUN, "training": {"steps": 1}, "evaluation": {"every_steps": 0}})
    train_here(spec, plant=lambda assembled: made.append(assembled.learner))
    return made[0]


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}
    learner.drop_gradients()
    return found


def test_replayed_gradients_are_those_of_each_batch(learner: Learner) -> None:
    first = batch(0, 3)
    graph = GradientGraph(learner, first, taped)
    for seed, documents in ((0, 3), (1, 1), (2, 20), (3, 7)):
        given = batch(seed, documents)
        totals = learner.totals(1, [given])
        loss = graph.gradients(given, totals.targets).clone()
        found = gradients_of(learner)
        expected = learner.gradients(1, [given], totals=totals)
        assert torch.equal(loss, expected), documents
        of_batch = gradients_of(learner)
        assert found.keys() == of_batch.keys()
        for name, gradient in of_batch.items():
            assert torch.equal(found[name], gradient), (documents, name)
    assert torch.equal(first.input_ids, batch(0, 3).input_ids), "it is read, and not written to"


def test_padded_rows_are_replayed_whatever_their_padding(learner: Learner) -> None:
    def padded(seed: int, *lengths: int) -> Batch:
        whole = batch(seed, 1)
        real = torch.arange(64) < torch.tensor(lengths)[:, None]
        labels = whole.labels.masked_fill(~real, IGNORED)
        count = int((labels != IGNORED).sum())
        return replace(
            whole,
            labels=labels,
            attention_mask=real,
            target_count=count,
            document_bounds=document_bounds(real),
        )

    graph = GradientGraph(learner, padded(0, 64, 50), taped)
    for seed, lengths in ((1, (64, 50)), (2, (30, 41)), (3, (64, 64))):
        given = padded(seed, *lengths)
        totals = learner.totals(1, [given])
        loss = graph.gradients(given, totals.targets).clone()
        found = gradients_of(learner)
        assert torch.equal(loss, learner.gradients(1, [given], totals=totals)), lengths
        for name, gradient in gradients_of(learner).items():
            assert torch.equal(found[name], gradient), (lengths, name)


def test_room_is_for_twice_the_documents_of_the_first_batch(learner: Learner) -> None:
    graph = GradientGraph(learner, batch(0, 20), taped)
    assert graph.room == 80
    assert graph.has_room_for(batch(0, 40))
    assert not graph.has_room_for(batch(0, 41))


def test_whole_rows_and_documents_are_two_shapes() -> None:
    assert shape_of(batch(0, 1)) == ((2, 64), False)
    assert shape_of(batch(0, 2)) == ((2, 64), True)
    assert shape_of(batch(0, 2, length=32)) == ((2, 32), True)
    ahead = batch(0, 2)
    object.__setattr__(ahead, "causal", False)
    assert shape_of(ahead) is None
    object.__setattr__(ahead, "causal", True)
    object.__setattr__(ahead, "document_bounds", None)
    assert shape_of(ahead) is None


def by(graphs: StepGraphs, learner: Learner, step: int, given: Batch) -> bool:
    """Whether the gradients of ``given`` were replayed."""
    before = graphs.to_json()["replayed_steps"]
    totals = learner.totals(step, [given])
    graphs.gradients(step, [given], totals, with_health=False, before=lambda number: None)
    learner.drop_gradients()
    return bool(graphs.to_json()["replayed_steps"] > before)


def test_a_graph_is_captured_where_the_device_waits(
    graphs: list[StepGraphs], learner: Learner
) -> None:
    waited = 7
    own = StepGraphs(None, learner, _Silent(), lambda: waited, taped)  # type: ignore[arg-type]
    steps = iter(range(1, 1000))

    def replays(given: Batch) -> bool:
        return by(own, learner, next(steps), given)

    few, many, whole, short = batch(0, 3), batch(0, 40), batch(0, 1), batch(0, 3, length=32)
    assert not any(replays(few) for _ in range(9)), "the host was no limit"
    waited = 8
    assert replays(few)
    waited = 0
    assert [replays(whole) for _ in range(4)] == [False, False, False, True]
    assert replays(few)
    assert replays(many), "one with more room takes its place"
    assert not any(replays(short) for _ in range(6)), "two are held, and no more"
    assert replays(few)
    assert replays(whole)


def test_a_graph_is_held_until_one_with_more_room_is_captured(
    graphs: list[StepGraphs], learner: Learner
) -> None:
    """They share memory, into which PyTorch captures nothing once it has been without a graph."""
    made: list[weakref.ref[Tape]] = []
    held: list[int] = []

    def watched(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        held.append(sum(tape() is not None for tape in made))
        tape = Tape()
        made.append(weakref.ref(tape))
        with tape:
            result = compute()
        return tape.replay, result

    own = StepGraphs(None, learner, _Silent(), lambda: 99, watched)  # type: ignore[arg-type]
    few, many = batch(0, 3), batch(0, 40)
    assert [by(own, learner, step, few) for step in range(1, 5)] == [False, False, False, True]
    assert by(own, learner, 5, many)
    gc.collect()
    assert held == [0, 1]
    assert [tape() is None for tape in made] == [True, False]
    assert by(own, learner, 6, few)


def test_where_memory_is_short_for_one_more_graph_the_others_are_kept(
    graphs: list[StepGraphs], learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = StepGraphs(None, learner, _Silent(), lambda: 99, taped)  # type: ignore[arg-type]
    few, whole, many = batch(0, 3), batch(0, 1), batch(0, 40)
    assert [by(own, learner, step, few) for step in range(1, 5)] == [False, False, False, True]
    monkeypatch.setattr(step_graphs, "_has_memory", lambda device: False)
    assert not any(by(own, learner, step, whole) for step in range(5, 11))
    assert not by(own, learner, 11, many)
    assert by(own, learner, 12, few)
    assert own.refusal is None


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_was_not_ended_is_ended_and_its_memory_given_back_once(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, Any]] = []

    def end(device: int, pool: Any) -> None:
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        calls.append(("end", device, pool))

    def release(device: int, pool: Any) -> None:
        calls.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release)
    gradient_graph._let_go(1, (0, 7))
    # The memory of one that was ended goes with its graph.
    assert calls == ([] if ended else [("end", 1, (0, 7)), ("release", 1, (0, 7))])


class _Silent:
    def event(self, kind: str, message: str, data: Any = None) -> None:
        assert kind == "step_graphed"


def test_bounds_with_room_show_the_same_sequences() -> None:
    given = batch(0, 5)
    assert given.document_bounds is not None
    bounds = torch.cat([given.document_bounds, given.document_bounds[-1:].expand(9)])
    own, padded = Sequences(2, 64, given.document_bounds), Sequences(2, 64, bounds)
    there = torch.device("cpu")
    assert torch.equal(own.positions(there), padded.positions(there))
    assert torch.equal(own.mask(there), padded.mask(there))


def spec_of(**parts: Any) -> JobSpec:
    spec = {
        "model": {"source": "config", "config": {"model_type": "llama"}},
        "data": {"source": "builtin"},
        "recipe": {"engine": "te"},
    }
    return parse_spec(spec | parts)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, None),
        ({"recipe": {"engine": "amp", "dtype": "bf16"}}, None),
        ({"recipe": {"engine": "te", "scaling": "current"}}, None),
        ({"recipe": {"engine": "amp", "dtype": "fp16"}}, "steps in fp16"),
        ({"recipe": {"engine": "torchao"}}, "steps with torchao"),
        ({"recipe": {"engine": "te", "scaling": "block"}}, "steps with scaling block"),
        ({"recipe": {"engine": "te", "interval": 2}}, "recipe.interval"),
        ({"recipe": {"engine": "te", "fp8_dpa": True}}, "attention in FP8"),
        ({"training": {"cuda_graphs": "off"}}, "training.cuda_graphs is off"),
        ({"training": {"gradient_accumulation": 2}}, "training.gradient_accumulation"),
        ({"training": {"gradient_checkpointing": True}}, "training.gradient_checkpointing"),
        ({"training": {"on_divergence": "skip_step"}}, "training.on_divergence"),
        ({"resources": {"gpus": 2}}, "several ranks"),
        ({"adapter": {}}, "steps of adapters"),
        (
            {
                "task": "masked_lm",
                "model": {"source": "config", "config": {"model_type": "bert"}},
            },
            "steps of the task masked_lm",
        ),
    ],
)
def test_which_specs_may_have_graphs(parts: dict[str, Any], reason: str | None) -> None:
    found = of_spec(spec_of(**parts))
    assert found is None if reason is None else reason in str(found)


def test_why_a_run_that_may_have_graphs_has_none() -> None:
    spec = spec_of(recipe={"engine": "amp", "dtype": "bf16"})
    model = nn.Sequential(nn.Linear(4, 4))
    report = ConversionReport(model, [], fusion=ModelFusion())
    for device, reason in (
        ("cpu", "there are graphs on CUDA devices only"),
        ("cuda", "not all blocks are fused"),
    ):
        engine = AmpEngine(AmpRecipe(engine="amp", dtype="bf16"), torch.device(device))
        optimizer = AdamW(
            model.named_parameters(),
            decayed=set(),
            lr=1.0,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.0,
        )
        task = create_task("causal_lm")
        learner = Learner(spec.training, model, engine, optimizer, task)
        assert step_graphs.graph_refusal(spec, learner, report) == reason


def test_attention_that_looks_ahead_has_no_graphs() -> None:
    model = bert()
    report = ConversionReport(model, [], fusion=fuse(model, PlainParts(), {}))
    assert "looks ahead" in str(step_graphs._unfit(report))


def test_steps_that_the_device_waited_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateMetrics(late=True)
    loss = torch.zeros(())
    for step in range(1, 4):
        late.push(step, {"loss": loss}, {})
    assert late.waited_for_host == 2  # of the first nothing was asked
    monkeypatch.setattr(Landing, "arrived", property(lambda self: False))
    late.push(4, {"loss": loss}, {})
    assert late.waited_for_host == 0
