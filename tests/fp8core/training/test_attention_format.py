"""What a run tells of the format that its attention computes in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fp8core.conversion import ConversionReport
from fp8core.data.batch import Batch
from fp8core.fusion import ModelFusion
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.training.attention_format import SHARE, AttentionFormat


def batch(*, documents: int) -> Batch:
    """Two rows of 32 tokens."""
    ids = torch.zeros(2, 32, dtype=torch.int64)
    owners = (torch.arange(32, dtype=torch.int32) * documents // 32).expand(2, 32)
    bounds = document_bounds(owners)
    positions = Sequences(2, 32, bounds).positions(ids.device)
    return Batch(ids, ids, None, positions, owners, 64, 64, True, bounds)


def watched(
    folder: Path, attention: Mapping[str, str | None]
) -> tuple[AttentionFormat, TelemetryWriter]:
    report = ConversionReport(nn.Identity(), [], fusion=ModelFusion(fp8_attention=dict(attention)))
    telemetry = TelemetryWriter(folder / "telemetry.jsonl")
    return AttentionFormat(report, telemetry), telemetry


def events(folder: Path) -> list[dict[str, object]]:
    records = [record for record, _ in read_records(folder / "telemetry.jsonl")]
    return [record for record in records if record.get("kind") == "attention_in_bf16"]


def test_the_share_of_whole_rows_since_it_was_last_asked_for(tmp_path: Path) -> None:
    attention, telemetry = watched(tmp_path, {"a": None, "b": "its window"})
    assert attention.figures() == {}
    attention.note(1, [batch(documents=1), batch(documents=1)])
    assert attention.figures() == {SHARE: 1.0}
    # Figures that a GPU gives a step late are recorded twice before the next step.
    assert attention.figures() == {SHARE: 1.0}
    attention.note(2, [batch(documents=1), batch(documents=3)])
    attention.note(3, [batch(documents=2), batch(documents=2)])
    assert attention.figures() == {SHARE: 0.25}
    telemetry.close()
    (event,) = events(tmp_path)
    assert event["data"] == {"step": 2, "micro_batches": 1, "of": 2}
    assert "data.packing" in str(event["message"])


def test_whole_rows_alone_are_no_event(tmp_path: Path) -> None:
    attention, telemetry = watched(tmp_path, {"a": None})
    attention.note(1, [batch(documents=1)])
    telemetry.close()
    assert events(tmp_path) == []


def test_nothing_is_told_where_no_attention_computes_in_fp8(tmp_path: Path) -> None:
    attention, telemetry = watched(tmp_path, {})
    attention.note(1, [batch(documents=3)])
    assert attention.figures() == {}
    telemetry.close()
    assert events(tmp_path) == []
