"""A job for a notebook: its state and its losses as an inline SVG, without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from octrain.client.models import JobData
from octrain.client.series import Series

_WIDTH, _HEIGHT, _MARGIN = 480, 120, 6
_COLOURS = {"train/loss": "#2563eb", "eval/loss": "#d97706"}
LOSSES = tuple(_COLOURS)


def job_html(job: JobData, series: Sequence[Series]) -> str:
    """HTML of a job; everything that came from outside is escaped."""
    progress = job.progress
    total = "?" if progress.total_steps is None else str(progress.total_steps)
    facts = [
        f"<b>{escape(job.name or job.id)}</b>",
        f"<code>{escape(job.id)}</code>",
        escape(job.status) + (f" ({escape(job.reason)})" if job.reason else ""),
        f"step {progress.step}/{escape(total)}",
    ]
    for name in LOSSES:
        value = job.latest_metrics.get(name)
        if value is not None:
            colour = _COLOURS[name]
            facts.append(f'<span style="color:{colour}">{escape(name)} {value:.4g}</span>')
    lines = [f"<div>{' · '.join(facts)}</div>"]
    if job.detail:
        lines.append(f"<div>{escape(job.detail)}</div>")
    drawn = curves_svg(series)
    return f"<div>{''.join(lines)}{drawn}</div>"


def curves_svg(series: Sequence[Series]) -> str:
    """An SVG of the series over their steps, on one scale; "" where fewer than two points are
    finite. NaN and infinities break a line."""
    shown = [one for one in series if one.points]
    finite = [(step, value) for one in shown for step, value in one.points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    steps = [step for step, _ in finite]
    values = [value for _, value in finite]
    left, low = min(steps), min(values)
    width, span = (max(steps) - left) or 1.0, (max(values) - low) or 1.0

    def place(step: float, value: float) -> str:
        x = _MARGIN + (step - left) / width * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (value - low) / span * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for one in shown:
        colour = _COLOURS.get(one.name, "#6b7280")
        title = escape(f"{one.name}, attempt {one.attempt}")
        for part in _unbroken(one):
            points = " ".join(place(step, value) for step, value in part)
            lines.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}">'
                f"<title>{title}</title></polyline>"
            )
    label = escape(f"{low:.4g} to {max(values):.4g}, steps {left:g} to {max(steps):g}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><title>{label}</title>{"".join(lines)}</svg>'
        f"<div><small>{label}</small></div>"
    )


def _unbroken(series: Series) -> list[list[tuple[float, float]]]:
    """The runs of finite points."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in series.points:
        if math.isfinite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
