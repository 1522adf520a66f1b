"""``plan``: what a job will take, from its spec alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fp8core.commands.quiet import quieten_libraries
from fp8core.commands.spec_file import SpecFile
from fp8core.models import Plan, plan
from fp8core.spec import ExitCode

__all__ = ["run_plan"]


def run_plan(
    spec_file: SpecFile,
    job_folder: Path | None = None,
    *,
    as_json: bool,
    card: str | None = None,
) -> int:
    """Prints parameters, conversion, memory and FLOPs; no weights are loaded.

    ``card``: the name of the GPU that the job would run on; None: this machine's, if it has one.
    """
    quieten_libraries()
    found = plan(
        spec_file.spec,
        roots=spec_file.roots,
        root_for_relative=spec_file.base,
        job_folder=job_folder,
        card=card or (torch.cuda.get_device_name() if torch.cuda.is_available() else None),
    )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return int(ExitCode.OK)
    console = Console()
    console.print(_table("Parameters", _named(found.parameters, "{:,}".format)))
    console.print(_table("Layers", _layers(found)))
    console.print(_table("Blocks", _blocks(found)))
    console.print(_table("FP8 beside bf16", _speeds(found)))
    memory = _named(found.memory, _size) | {"CUDA graphs": str(found.cuda_graphs["says"])}
    console.print(_table("Memory on one device", memory))
    console.print(_table("Checkpoint", {"on disk, and on the host": _size(found.checkpoint_bytes)}))
    flops = found.flops
    work = {name: f"{getattr(flops, name):.4g}" for name in ("total", "gemm", "attention")}
    work["of gemm in FP8"] = f"{flops.fp8_share:.1%}"
    work["tokens of one step"] = f"{found.tokens_per_step:,}"
    console.print(_table("FLOPs of one step", work))
    return int(ExitCode.OK)


def _layers(found: Plan) -> dict[str, str]:
    shown = {key: str(found.conversion[key]) for key in ("converted", "kept")}
    because = found.conversion["kept_because"]
    if isinstance(because, dict):
        shown.update({f"kept: {reason}": str(count) for reason, count in because.items()})
    return shown


def _blocks(found: Plan) -> dict[str, str]:
    """Whether they would be fused: the proof on numbers that fusion asks for needs the GPU."""
    fusion = found.fusion
    shown = {"would be fused": f"{fusion['fused']} of {fusion['blocks']}"}
    if fusion["fused_in_part"]:
        shown["would be fused in part"] = str(fusion["fused_in_part"])
    because = fusion["not_because"]
    if isinstance(because, dict):
        if not (fusion["fused"] or fusion["fused_in_part"]) and len(because) == 1:
            shown["none, because"] = next(iter(because))  # of all alike, so that no count is told
        else:
            shown.update({f"not: {reason}": str(count) for reason, count in because.items()})
    return shown


def _speeds(found: Plan) -> dict[str, str]:
    """What was measured of layers of these sizes, and of models of about this size."""
    shown = {"layers": str(found.small_gemm["says"])}
    for number, quoted in enumerate(found.measured):
        shown["model" if not number else f"model, {number + 1}"] = str(quoted["says"])
    return shown


def _named(counts: dict[str, int], shown: Callable[[int], str]) -> dict[str, str]:
    return {name.replace("_", " "): shown(count) for name, count in counts.items()}


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
