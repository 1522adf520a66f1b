"""`octrain watch`, `wait`: bars in a terminal; elsewhere a line at each change of the status, and
every few seconds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from octrain.cli import context
from octrain.cli.context import JsonOption
from octrain.cli.exits import Exit
from octrain.cli.options import JobsArgument, span
from octrain.cli.render import duration, names_of, number
from octrain.client import AsyncClient, AsyncJob, Job, StreamEvent

_LINE_SECONDS = 5.0
# Of the stream only what is shown: logs and each layer's health can be a thousand times that.
_SHOWN = ("status", "metrics")
_METRICS = ("train/loss", "eval/loss", "perf/tokens_per_second")


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
        view.show()
        view.follow(job.stream(after=job.data.last_event, include=_SHOWN, metrics=_METRICS))
        job.refresh()
        view.status = job.status
        self._show(title, task, view, last=True)
        return job

    async def watch_async(self, job: AsyncJob, title: str) -> AsyncJob:
        """The same beside others in one event loop; ``title`` is escaped."""
        task = self._progress.add_task(title, total=None, state=job.status, steps="?")
        view = _View(job, lambda view: self._show(title, task, view))
        view.show()
        async for event in job.stream(after=job.data.last_event, include=_SHOWN, metrics=_METRICS):
            view.take(event)
        await job.refresh()
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
        is_due = last or view.status != view.printed_status or now - view.printed > _LINE_SECONDS
        line = f"{title}: step {view.step}/{view.total or '?'}, {view.text()}"
        if not self._live and is_due and line != view.printed_line:
            view.printed, view.printed_status, view.printed_line = now, view.status, line
            self._console.print(line, highlight=False, soft_wrap=True)


class _View:
    """What is known of one job, from its events."""

    def __init__(self, job: Job | AsyncJob, show: Callable[[_View], None]) -> None:
        self.status = job.status
        self.step = job.data.progress.step
        self.total = job.data.progress.total_steps
        self.eta = job.data.progress.eta_seconds
        self.metrics: dict[str, float] = dict(job.data.latest_metrics)
        self.waiting_for: str | None = job.data.waiting_for
        self.printed = time.monotonic()
        self.printed_status: str | None = None
        self.printed_line: str | None = None
        self._show = show

    def follow(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self.take(event)

    def show(self) -> None:
        self._show(self)

    def take(self, event: StreamEvent) -> None:
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


def watch(jobs: JobsArgument, json_output: JsonOption = False) -> None:
    """Follow jobs to their end: loss, tokens/s, time left; status 6 unless all succeed.

    With --json: each event as one JSON object a line. Ctrl-C leaves the jobs as they are.
    """
    ended = asyncio.run(_watch_all(list(dict.fromkeys(jobs)), json_output))
    if any(job.status != "succeeded" for job in ended):
        raise typer.Exit(Exit.JOB_NOT_SUCCEEDED)


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after this time, as 90s or 6h; status 9.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Return when jobs have ended; status 6 unless all succeeded."""
    limit = None if timeout is None else span(timeout, "--timeout").total_seconds()
    deadline = None if limit is None else time.monotonic() + limit
    ended = []
    with context.client() as client:
        for job_id in jobs:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            job = client.jobs.get(job_id).wait(left)
            ended.append(job.data)
            if not json_output:
                context.console.print(f"{job.id} {job.status}", highlight=False)
    if json_output:
        context.print_json(ended[0] if len(ended) == 1 else ended)
    if any(job.status != "succeeded" for job in ended):
        raise typer.Exit(Exit.JOB_NOT_SUCCEEDED)


async def _watch_all(ids: list[str], json_output: bool) -> list[AsyncJob]:
    async with AsyncClient(context.url) as client:
        found = [await client.jobs.get(job_id) for job_id in ids]
        if json_output:
            await asyncio.gather(*map(_print_events, found))
            return found
        with JobBars(context.console) as bars:
            titles = names_of([job.data for job in found])
            return list(await asyncio.gather(*map(bars.watch_async, found, titles)))


async def _print_events(job: AsyncJob) -> None:
    async for event in job.stream():
        told = {"job_id": job.id, "id": event.id, "type": event.type, "data": event.data}
        print(json.dumps(told), flush=True)
    await job.refresh()
