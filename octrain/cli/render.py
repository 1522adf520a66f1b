"""How jobs and numbers look in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.markup import escape
from rich.table import Table

from octrain.client import JobData

_COLOURS = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "cyan",
    "pausing": "yellow",
    "paused": "yellow",
    "cancelling": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
_BLOCKS = "▁▂▃▄▅▆▇█"


def table(*columns: str) -> Table:
    """A table in the style of all our lists."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return made


def names_of(jobs: Sequence[JobData]) -> list[str]:
    """What to call each of several jobs: by its name, and where another has the same by its id
    too. Escaped for rich.
    """
    names = [job.name or job.id for job in jobs]
    return [
        escape(name if names.count(name) == 1 else f"{name} ({job.id})")
        for name, job in zip(names, jobs, strict=True)
    ]


def status_text(job: JobData) -> str:
    """The status in its colour, with the reason when there is one to tell."""
    text = job.status
    if job.reason and job.reason != "completed":
        text += f" ({job.reason})"
    elif job.queue_position is not None:
        text += f" (#{job.queue_position})"
    return f"[{_COLOURS.get(job.status, 'white')}]{escape(text)}[/]"


def progress_text(job: JobData) -> str:
    total = job.progress.total_steps
    return f"{job.progress.step}/{total if total is not None else '?'}"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def least(values: Sequence[float]) -> float | None:
    """The smallest that is a number; NaN where none is, None of none at all."""
    if not values:
        return None
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def size(count: int | None) -> str:
    """Bytes for a person."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def age(moment: datetime | None) -> str:
    return "-" if moment is None else duration((datetime.now(UTC) - moment).total_seconds())


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of blocks; NaN and infinities are gaps."""
    if len(values) > width:
        values = [values[i * len(values) // width] for i in range(width)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] if math.isfinite(value) else " "
        for value in values
    )
