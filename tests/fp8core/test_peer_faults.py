"""The faults of the peer, as `benchmarks/peers/accelerate_faults.py` probes them: none is ours.

On a CPU the emulated engine stands where Transformer Engine does on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
PAGE = HERE.parents[1] / "docs" / "recipes.md"
NUMBERS = (
    *("1", "2", "3", "4", "5a", "5b", "5c", "6"),
    *("7a", "7b", "8a", "8b", "9", "10", "11", "12", "13"),
)
NOT_OFFERED = {"9": "deepspeed_config", "10": "fsdp_version"}


@pytest.fixture(scope="module")
def faults() -> Iterator[Any]:
    """The benchmark's modules, which import one another as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from peers import accelerate_faults, fault_probes, fault_sides

        yield accelerate_faults, {p.number: p for p in fault_probes.PROBES}, fault_sides


def test_every_probe_is_run_here(faults: Any) -> None:
    _, probes, _ = faults
    assert tuple(probes) == NUMBERS


# The first cell of a row: one number or several, and nothing else.
FAULTS = r"\| \d+[a-c]?(, \d+[a-c]?)* \|"


def test_the_page_names_each_fault_and_tests_that_there_are() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(FAULTS, line)]
    numbers = [number for row in rows for number in row.split("|")[1].strip().split(", ")]
    assert tuple(numbers) == NUMBERS
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, function in named:
            assert f"def {function}(" in (HERE / file).read_text(), (file, function)


@pytest.mark.parametrize("number", NUMBERS)
def test_octrain_does_it_right(faults: Any, number: str) -> None:
    runner, probes, sides = faults
    result = runner.verdict_of(probes[number], sides.OctrainSide())
    if number in NOT_OFFERED:
        assert result["verdict"] == "refused", result
        assert NOT_OFFERED[number] in result["seen"]["says"]
    elif result["verdict"] == "not run":
        pytest.skip(result["seen"]["needs"])
    else:
        assert result["verdict"] == "right", result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_transformer_engine_does_it_right(faults: Any) -> None:
    runner, probes, _ = faults
    results = runner.run("octrain", list(probes))  # in a process of its own
    for number, result in results.items():
        expected = "refused" if number in NOT_OFFERED else "right"
        assert result["verdict"] == expected, (number, result)


# What Accelerate 1.15 was seen to do, by number; where it raises, the nearest thing to it.
SEEN_OF_THE_PEER: dict[str, dict[str, Any]] = {
    "1": {"converted": [], "should be converted": ["1", "2"]},
    "2": {
        "head converted": True,
        "head equals embedding after a step": False,
        "trained, but not in the optimizer": ["lm_head.weight"],
    },
    "3": {"requires_grad": True, "got a gradient": True, "changed": True},
    "4": {
        "converted": ["0", "1"],
        "modules that left eval mode": 2,
        "calls of the hook in one pass": 0,
    },
    "5a": {"parameters gained": [], "parameters lost": ["1.weight"], "output error": 0.03},
    "5b": {"parameters gained": ["1.weight"], "parameters lost": [], "output error": 0.03},
    "5c": {"parameters gained": ["1.bias"], "parameters lost": [], "output error": 0.03},
    "6": {
        "still converted": ["0", "1"],
        "foreign keys in the state dict": ["0._extra_state", "1._extra_state"],
        "weights are the trained ones": True,
    },
    "7a": {"asked for": "most_recent", "at work": "max"},
    "7b": {"documented": "most_recent", "at work": "max"},
    "8a": {"scale changed at updates": [1, 2, 3, 4, 5, 6, 7, 8], "should change at": [1, 5]},
    "8b": {"FFF": "FFF", "FFH": "FFF"},
    "9": {"scale": 448.0, "scale of margin 3": 56.0},
    "10": {"converted": ["0"], "gemms": "HHH"},
    "11": {
        "converted": ["1", "2"],
        "weights without change": ["1.weight", "2.weight"],
        "saved as safetensors": "RuntimeError",
    },
    "12": {"distance of a gradient from bf16's": 0.06, "its change by recomputation": 0.06},
    "13": {
        "converted": 8,
        "extra memory / largest layer": 8.0,
        "extra memory / all weights": 1.0,
    },
}


@pytest.mark.parametrize("number", NUMBERS)
def test_the_rule_turns_down_what_the_peer_does(faults: Any, number: str) -> None:
    _, probes, _ = faults
    assert not probes[number].right(SEEN_OF_THE_PEER[number])
