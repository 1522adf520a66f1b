"""A job's progress as it happens: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from octrain.cli.render import duration, number
from octrain.client import Job, StreamEvent

_LINE_SECONDS = 5.0


class JobBars:
    """A context manager that shows jobs; ``watch`` follows one to its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.fields[steps]}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )

    def __enter__(self) -> JobBars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def watch(self, job: Job, title: str | None = None) -> Job:
        """Show the job until it has ended; the job, refreshed. Errors: those of ``stream``."""
        title = escape(title or job.data.name or job.id)
        task = self._progress.add_task(title, total=None, state=job.status, steps="?")
        view = _View(job, lambda view: self._show(title, task, view))
        view.follow(job.stream())
        job.refresh()
        view.status = job.status
        self._show(title, task, view, last=True)
        return job

    def _show(self, title: str, task: TaskID, view: _View, *, last: bool = False) -> None:
        self._progress.update(
            task,
            completed=view.step,
            total=view.total,
            state=view.text(),
            steps=view.total or "?",
        )
        now = time.monotonic()
        if not self._live and (last or now - view.printed > _LINE_SECONDS):
            view.printed = now
            self._console.print(
                f"{title}: step {view.step}/{view.total or '?'}, {view.text()}",
                highlight=False,
                soft_wrap=True,
            )


class _View:
    """What is known of one job, from its events."""

    def __init__(self, job: Job, show: Callable[[_View], None]) -> None:
        self.status = job.status
        self.step = job.data.progress.step
        self.total = job.data.progress.total_steps
        self.eta: float | None = None
        self.metrics: dict[str, float] = dict(job.data.latest_metrics)
        self.waiting_for: str | None = job.data.waiting_for
        self.printed = time.monotonic()
        self._show = show

    def follow(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self._take(event.type, event.data)
            self._show(self)

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "status":
            self.status = str(data.get("status") or self.status)
            self.waiting_for = data.get("waiting_for")
        elif kind == "progress":
            self.step = int(data.get("step") or 0)
            self.total = data.get("total_steps") or self.total
            self.eta = data.get("eta_seconds")
        elif kind == "metrics":
            values = data.get("values")
            if isinstance(values, dict):
                self.metrics.update({name: float(value) for name, value in values.items()})

    def text(self) -> str:
        """Status, loss, speed and time left, as far as they are known."""
        parts = [self.status]
        if self.status == "queued" and self.waiting_for:
            parts.append(f"waiting for {escape(self.waiting_for)}")
        for name, label in (("train/loss", "loss"), ("eval/loss", "held out")):
            if name in self.metrics:
                parts.append(f"{label} {number(self.metrics[name])}")
        if "perf/tokens_per_second" in self.metrics:
            parts.append(f"{number(round(self.metrics['perf/tokens_per_second']))} tokens/s")
        if self.eta is not None and self.status == "running":
            parts.append(f"{duration(self.eta)} left")
        return ", ".join(parts)
