"""What Accelerate does wrong with FP8, and what Octrain does in its place: the same probes on both.

    python benchmarks/peers/accelerate_faults.py [--out faults.json] [--only 1 8b]

Each probe is done with Accelerate (``Accelerator(mixed_precision="fp8")`` with its recipe kwargs)
and with fp8core (``convert`` and an engine). What was seen is printed, and whether it is right,
which one rule decides for both sides:

    right    as it should be
    wrong    done, without an error, and not as it should be
    fails    ends with an exception, which is shown
    refused  the setting is refused before anything is done, with the reason shown

Needs accelerate and torchao; what needs Transformer Engine runs on a GPU that has it, and is marked
so elsewhere (Octrain's side then runs on its emulated engine). Each side runs in processes of its
own: a probe that ends the process costs only itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As a script it finds its own folder first, and its parts are those of the package.
_BENCHMARKS = str(Path(__file__).resolve().parents[1])
if _BENCHMARKS not in sys.path:
    sys.path.insert(0, _BENCHMARKS)

# torch, which comes with these, is for the processes that probe.
if TYPE_CHECKING:
    from peers.fault_sides import Side
    from peers.probe_parts import Probe

LONGEST_SECONDS = 150
VERSIONS = ("torch", "transformer_engine", "accelerate", "torchao", "transformers")
Result = dict[str, Any]


def verdict_of(probe: Probe, side: Side) -> Result:
    """Do ``probe`` on ``side`` and judge what was seen."""
    from peers.fault_sides import can_run

    from fp8core.errors import EngineUnsupported, SpecRefused
    from fp8core.spec import SpecInvalid

    if (side.name == "accelerate" or probe.needs_gpu) and not can_run(probe.backend):
        what = "a GPU with Transformer Engine" if probe.backend == "te" else "torchao"
        return {"verdict": "not run", "seen": {"needs": what}}
    try:
        seen = probe.observe(side)
    except (EngineUnsupported, SpecInvalid, SpecRefused) as refusal:
        return {"verdict": "refused", "seen": {"says": str(refusal)}}
    except Exception as error:
        first_line = str(error).strip().splitlines()[:1]
        return {"verdict": "fails", "seen": {type(error).__name__: " ".join(first_line)}}
    return {"verdict": "right" if probe.right(seen) else "wrong", "seen": seen}


def work(side_name: str, numbers: list[str], results: Path) -> None:
    """One process of one side: a line of JSON before and after each probe."""
    from peers.fault_probes import PROBES
    from peers.fault_sides import AccelerateSide, OctrainSide

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sides: dict[str, type[Side]] = {"accelerate": AccelerateSide, "octrain": OctrainSide}
    side = sides[side_name]()
    with results.open("a") as file:
        for probe in PROBES:
            if probe.number not in numbers:
                continue
            print(json.dumps({"number": probe.number}), file=file, flush=True)
            started = time.perf_counter()
            result = verdict_of(probe, side) | {"seconds": time.perf_counter() - started}
            print(json.dumps({"number": probe.number} | result), file=file, flush=True)


def run(side: str, numbers: list[str]) -> dict[str, Result]:
    """The results of these probes on ``side``, in as few processes as live through them."""
    results: dict[str, Result] = {}
    while left := [number for number in numbers if number not in results]:
        records, how, last_words = one_process(side, left)
        results |= {record.pop("number"): record for record in records if len(record) > 1}
        lost = [number for number in left if number not in results]
        if lost:
            # The probe that the process died in; all of them where it died outside of any.
            begun = records[-1].get("number") if records else None
            lost = [begun] if begun in lost else lost
            results |= {number: {"verdict": "fails", "seen": {"process": how}} for number in lost}
            print(f"{side}, {', '.join(lost)}: process {how}\n{last_words}", file=sys.stderr)
    return results


def one_process(side: str, numbers: list[str]) -> tuple[list[Result], str, str]:
    """What it wrote down, how it ended, and the end of what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    with tempfile.TemporaryDirectory() as folder:
        records, printed = Path(folder, "records"), Path(folder, "printed")
        records.touch()
        command = [sys.executable, __file__, "--worker", side, str(records), "--only", *numbers]
        how = f"stopped after {LONGEST_SECONDS} seconds"
        with printed.open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, stdout=log, stderr=log, env=environment, timeout=LONGEST_SECONDS
            )
            how = f"ended with exit code {done.returncode}"
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        return lines, how, printed.read_text(errors="replace")[-2000:]


def shown(seen: dict[str, Any]) -> str:
    def value(item: Any) -> str:
        if isinstance(item, bool):
            return "yes" if item else "no"
        if isinstance(item, float):
            return f"{item:.3g}"
        if isinstance(item, list):
            return ", ".join(map(str, item)) or "none"
        return str(item)

    return "; ".join(f"{key}: {value(item)}" for key, item in seen.items())


def table(probes: Sequence[Probe], sides: dict[str, dict[str, Result]]) -> str:
    lines = []
    for probe in probes:
        lines.append(f"{probe.number:<4}{probe.title}")
        for side, results in sides.items():
            result = results[probe.number]
            head = f"    {side:<11}{result['verdict']:<8} "
            lines.append(
                textwrap.fill(
                    shown(result["seen"]),
                    width=100,
                    initial_indent=head,
                    subsequent_indent=" " * len(head),
                )
            )
    return "\n".join(lines)


def machine() -> dict[str, str]:
    import torch

    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"device": gpu, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write machine, probes and results as JSON")
    parser.add_argument("--only", nargs="+", default=[], metavar="NUMBER", help="these probes")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker[0], arguments.only, Path(arguments.worker[1]))
        return

    from peers.fault_probes import PROBES
    from peers.fault_sides import can_run

    started = time.perf_counter()
    probes = [probe for probe in PROBES if not arguments.only or probe.number in arguments.only]
    if unknown := set(arguments.only) - {probe.number for probe in PROBES}:
        parser.error(f"no such probe: {', '.join(sorted(unknown))}")
    together = [probe.number for probe in probes if not probe.alone]
    groups = [together] if together else []
    groups += [[probe.number] for probe in probes if probe.alone]
    names = ("accelerate", "octrain")
    with ThreadPoolExecutor() as pool:
        running = {name: [pool.submit(run, name, group) for group in groups] for name in names}
        sides = {
            name: {number: r for future in futures for number, r in future.result().items()}
            for name, futures in running.items()
        }
    about = machine()
    print(table(probes, sides))
    print(f"\n{', '.join(f'{key} {value}' for key, value in about.items())}")
    if not can_run("te"):
        print("octrain: its emulated engine in the place of Transformer Engine")
    for name in names:
        verdicts = [sides[name][probe.number]["verdict"] for probe in probes]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        print(f"{name}: {counts}")
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.out:
        content = {
            "machine": about,
            "probes": [
                {"number": p.number, "title": p.title, **{n: sides[n][p.number] for n in names}}
                for p in probes
            ],
        }
        arguments.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
