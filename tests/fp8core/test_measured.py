"""Tables of measured figures: found by card, read between the sizes that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fp8core.measured import cards, layer_times, model_speeds, nearest_model
from fp8core.measured.tables import FOLDER
from tests.fp8core.planted_measurements import (
    CARD,
    bf16_time,
    plant_layers,
    plant_models,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("fp8core.measured.tables.FOLDER", tmp_path)
    return tmp_path


def test_a_card_without_a_table_has_no_times(folder: Path) -> None:
    assert layer_times(CARD) is None
    assert model_speeds(CARD) == []
    assert nearest_model(CARD, 1000) is None
    plant_layers(folder)
    assert layer_times("Planted Card") is None, "a name is matched whole"
    assert cards("layers") == [CARD]
    assert cards("models") == []


def test_times_between_measured_sizes(folder: Path) -> None:
    plant_layers(folder)
    times = layer_times(CARD)
    assert times is not None
    assert times.columns == {"bf16", "delayed"}, "the host's times are not a precision"

    def bf16(tokens: int, width: int, out: int) -> float | None:
        return times.microseconds("linear", "bf16", tokens, width, out)

    assert bf16(1024, 128, 512) == pytest.approx(bf16_time("linear", 1024, 128, 512))
    # A product of sizes is log-linear, so that every size between is exact too.
    assert bf16(700, 50, 300) == pytest.approx(bf16_time("linear", 700, 50, 300))
    assert bf16(100, 16, 32) == pytest.approx(bf16_time("linear", 256, 32, 32))
    assert bf16(4096, 128, 128) == pytest.approx(bf16_time("linear", 1024, 128, 128))
    assert bf16(1024, 513, 128) is None, "nothing is known of wider layers"
    assert bf16(1024, 128, 513) is None
    assert times.microseconds("linear", "block", 1024, 128, 128) is None
    assert [times.measured_tokens(n) for n in (1, 512, 9999)] == [256, 512, 1024]
    half_way = times.microseconds("linear", "delayed", 1024, 64, 128)
    assert half_way == pytest.approx(bf16_time("linear", 1024, 64, 128)), "twice and half: once"


def test_a_size_that_was_left_out_is_unknown_and_so_is_what_needs_it(folder: Path) -> None:
    plant_layers(folder)
    path = folder / "planted.layers.json"
    table = json.loads(path.read_text())
    gone = {"kind": "linear", "tokens": 256, "in": 32, "out": 32}
    table["rows"] = [row for row in table["rows"] if not gone.items() <= row.items()]
    path.write_text(json.dumps(table))
    times = layer_times(CARD)
    assert times is not None
    assert times.microseconds("linear", "bf16", 300, 40, 40) is None
    assert times.microseconds("linear", "bf16", 1024, 40, 40) is not None
    assert times.microseconds("norm_mlp", "bf16", 300, 40, 40) is not None


def test_the_nearest_model_is_so_by_ratio(folder: Path) -> None:
    small = {"plain": 90, "fused": 110, "octrain_bf16": 80, "bf16": 100}
    plant_models(folder, {100: small, 1000: {"fused": 30, "bf16": 20}, 9000: {"bf16": 3}})
    assert [speeds.parameters for speeds in model_speeds(CARD)] == [100, 1000], "no FP8 at 9000"
    assert nearest_model(CARD, 299).parameters == 100  # type: ignore[union-attr]
    assert nearest_model(CARD, 340).parameters == 1000  # type: ignore[union-attr]
    assert nearest_model(CARD, 32) is None, "too far from all"
    assert nearest_model(CARD, 3100) is None
    found = nearest_model(CARD, 40)
    assert found is not None
    assert (found.tokens, found.precision) == (8192, "bf16")
    assert found.bf16_beside("fused") == (100, True)
    assert found.bf16_beside("plain") == (100, False)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_the_tables_of_the_package_say_where_they_are_from(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core.measured.tables.FOLDER", FOLDER)
    table = json.loads(path.read_text())
    assert table["format"] == 1
    commands = table["commands"] if "commands" in table else [table["command"]]
    assert all(command.startswith("python benchmarks/") for command in commands)
    assert commands
    assert table["versions"].keys() >= {"torch", "transformer_engine"}
    if path.name.endswith(".layers.json"):
        times = layer_times(table["card"])
        assert times is not None
        assert times.columns >= {"bf16", "delayed"}
        assert {kind for kind, _ in times.grids} == {"linear", "norm_linear", "norm_mlp"}
        assert all(time > 0 for grid in times.grids.values() for time in grid.values())
    else:
        assert model_speeds(table["card"])


@pytest.mark.parametrize(
    ("row", "heading"),
    [("fused_head", "Blocks fused on both sides"), ("plain", "Layer by layer (")],
)
def test_what_is_quoted_of_a_size_is_what_the_page_of_sizes_says(
    row: str, heading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core.measured.tables.FOLDER", FOLDER)
    page = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text()
    told = dict[str, tuple[str, ...]]()
    for line in page.partition(f"\n{heading}")[2].partition("\n**So ")[0].splitlines():
        if not line.startswith("|") and len(told) > 1:
            break
        if found := re.match(r"\| (\d+[mb])[^|]*\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", line):
            told[found[1]] = found.groups()[1:]
    quoted = dict[str, tuple[str, ...]]()
    for speeds in model_speeds("NVIDIA H200"):
        fp8 = speeds.tokens_per_second[row]
        bf16, _ = speeds.bf16_beside(row)
        quoted[speeds.size] = (f"{bf16:,.0f}", f"{fp8:,.0f}", f"{fp8 / bf16:.2f}")
    assert set(told) == {"60m", "125m", "350m", "1b", "3b", "8b"}
    assert quoted == told
