"""`octrain diff`"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from octrain.cli import context
from octrain.cli.context import JsonOption, console
from octrain.cli.render import duration, names_of, number, status_text, table
from octrain.client import JobData

_ABSENT = object()
_FIGURES = (
    "train/loss",
    "eval/loss",
    "train/grad_norm",
    "perf/tokens_per_second",
    "perf/step_seconds",
    "memory/peak_bytes",
)


def diff(
    first: Annotated[str, typer.Argument(help="The id of a job.", metavar="JOB")],
    second: Annotated[str, typer.Argument(help="The id of another.", metavar="JOB")],
    json_output: JsonOption = False,
) -> None:
    """Compare two jobs: where their specs differ, and what came out."""
    with context.client() as client:
        jobs = client.jobs.get(first).data, client.jobs.get(second).data
    changes = spec_differences(jobs[0].spec, jobs[1].spec)
    figures = figures_of(*jobs)
    if json_output:
        context.print_json({"jobs": [j.id for j in jobs], "spec": changes, "figures": figures})
        return
    names = names_of(jobs)
    rows = table("SPEC", *names)
    for change in changes:
        rows.add_row(escape(change["pointer"]), *(escape(_shown(change, n)) for n in ("a", "b")))
    if changes:
        console.print(rows)
    else:
        console.print("The specs are the same.")
    results = table("RESULT", f">{names[0]}", f">{names[1]}", ">DIFFERENCE")
    results.add_row("status", *(status_text(job) for job in jobs), "")
    for figure in figures:
        left, right = figure["a"], figure["b"]
        show = duration if figure["name"] == "seconds" else number
        relative = f"{(right - left) / abs(left):+.1%}" if left and right is not None else ""
        results.add_row(figure["name"], show(left), show(right), relative)
    console.print(results)


def spec_differences(a: Any, b: Any, pointer: str = "") -> list[dict[str, Any]]:
    """Where two JSON values differ: ``pointer`` (RFC 6901), and ``a`` and ``b`` where present."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in [*a, *(key for key in b if key not in a)]:
            part = key.replace("~", "~0").replace("/", "~1")
            found += spec_differences(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{pointer}/{part}")
        return found
    # JSON knows true from 1, and 1.0 is 1.
    if (type(a) is type(b) or (_numeric(a) and _numeric(b))) and a == b:
        return []
    row: dict[str, Any] = {"pointer": pointer}
    row |= {name: value for name, value in (("a", a), ("b", b)) if value is not _ABSENT}
    return [row]


def figures_of(a: JobData, b: JobData) -> list[dict[str, Any]]:
    """What both came to: steps, tokens, seconds of training and the newest values of metrics."""
    rows: list[dict[str, Any]] = [
        {"name": "steps", "a": a.progress.step, "b": b.progress.step},
        {"name": "tokens", "a": a.progress.tokens, "b": b.progress.tokens},
        {"name": "seconds", "a": _seconds(a), "b": _seconds(b)},
    ]
    for name in _FIGURES:
        if name in a.latest_metrics or name in b.latest_metrics:
            rows.append(
                {"name": name, "a": a.latest_metrics.get(name), "b": b.latest_metrics.get(name)}
            )
    return rows


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(job: JobData) -> float | None:
    if job.started_at is None or job.ended_at is None:
        return None
    return (job.ended_at - job.started_at).total_seconds()


def _shown(change: dict[str, Any], name: str) -> str:
    if name not in change:
        return "-"
    text = json.dumps(change[name], ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
