"""What a chaos run may have lost, looked for from outside: over HTTP and in the store."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octrain_api.jobs.transitions import TABLE
from tests.chaos.users import Api, PostedJob

__all__ = ["KINDS", "Losses"]

_EDGES = {(None, "queued")} | {(source.value, to.value) for source, to, _ in TABLE}
KINDS = {
    "posts": "a job that was refused, not found, or made twice",
    "endings": "a job without an end, or with one that nothing explains",
    "attempts": "attempts left open, or not numbered one after another",
    "metrics": "a step not stored, stored twice, or with another value than undisturbed",
    "events": "an event missing in a job's stream, or a change of status without its event",
    "artifacts": "an artifact whose files are not those of its sha256, or a model not there",
    "doubles": "two trainers of one job alive at one instant",
    "processes": "processes left over",
    "slots": "slots of nodes that are not free again",
    "answers": "answers with an internal error",
}


class Losses:
    """Counts by kind, each with a line that says what and where."""

    def __init__(self, api: Api, references: Mapping[int, Sequence[float]]) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.attempts = 0
        self.restarts = 0
        self.steps = 0
        self.files = 0
        self._api = api
        self._references = references

    def add(self, kind: str, what: str) -> None:
        assert kind in KINDS
        self.counts[kind] += 1
        self.lines.append(f"{kind}: {what}")

    def check(self, job: PostedJob, *, full_disk: str | None, torn: set[str]) -> None:
        """Everything about one job. ``full_disk`` is the node whose disk was filled at times;
        ``torn`` are the ids of artifacts that were damaged on purpose.
        """
        answer = self._api.ask("GET", f"/jobs/{job.id}")
        if answer.status_code != 200:
            self.add("posts", f"{job.id} was answered 201 and is now {answer.status_code}")
            return
        found = answer.json()
        self._posted_once(job)
        self._ending(job, found, full_disk)
        self._attempts(job, found)
        self._metrics(job, found)
        self._events(job, found)
        self._artifacts(job, found, torn)

    def _posted_once(self, job: PostedJob) -> None:
        same = self._api.get("/jobs", name=job.spec["name"])["items"]
        if len(same) != 1:
            self.add("posts", f"{job.key} has made {len(same)} jobs")

    def _ending(self, job: PostedJob, found: dict[str, Any], full_disk: str | None) -> None:
        status, reason = found["status"], found["reason"]
        self.outcomes[f"{status} ({reason})" if status == "failed" else status] += 1
        wanted = "cancelled" if job.cancelled else "succeeded"
        nodes = {attempt["node"] for attempt in found["attempts"]}
        if status == "failed" and reason == "storage_full" and full_disk in nodes:
            return
        if status != wanted:
            self.add(
                "endings",
                f"{job.id} {job.spec['name']} is {status} ({reason}: {found['detail']}), not "
                f"{wanted}; asked: {job.asked}",
            )

    def _attempts(self, job: PostedJob, found: dict[str, Any]) -> None:
        attempts = found["attempts"]
        self.attempts += len(attempts)
        self.restarts += found["restarts"]
        self.reasons.update(str(attempt["reason"]) for attempt in attempts)
        numbers = [attempt["number"] for attempt in attempts]
        if numbers != list(range(1, len(numbers) + 1)):
            self.add("attempts", f"{job.id} has the attempts {numbers}")
        for attempt in attempts:
            if found["is_final"] and attempt["status"] != "ended":
                self.add("attempts", f"{job.id} has ended, its attempt {attempt} has not")

    def _metrics(self, job: PostedJob, found: dict[str, Any]) -> None:
        for attempt in found["attempts"]:
            number = attempt["number"]
            points = self._points(job, attempt=number)
            steps = [step for step, _ in points]
            if steps and steps != list(range(steps[0], steps[-1] + 1)):
                self.add("metrics", f"{job.id}, attempt {number}: steps {_odd(steps)}")
        joined = self._points(job)
        steps = [step for step, _ in joined]
        self.steps += len(steps)
        last = job.steps if found["status"] == "succeeded" else len(steps)
        if steps != list(range(1, last + 1)):
            self.add("metrics", f"{job.id}, joined, {last} wanted: steps {_odd(steps)}")
            return
        wanted = self._references[job.seed if job.kind == "real" else -job.seed]
        for step, value in joined:
            if value != wanted[step - 1]:
                due = wanted[step - 1]
                self.add("metrics", f"{job.id}: step {step} is {value!r}, undisturbed {due!r}")
                return

    def _points(self, job: PostedJob, **parameters: Any) -> list[tuple[int, float]]:
        answer = self._api.get(f"/jobs/{job.id}/metrics", keys="train/loss", **parameters)
        return [
            (int(step), float(value))
            for series in sorted(answer["series"], key=lambda one: one["attempt"])
            for step, value in series["points"]
        ]

    def _events(self, job: PostedJob, found: dict[str, Any]) -> None:
        if not found["is_final"]:
            return
        text = self._api.ask("GET", f"/jobs/{job.id}/stream").text
        numbers = [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]
        # Metric batches that are stored together take the last of their numbers in the stream.
        if numbers != sorted(set(numbers)) or numbers[-1:] != [found["last_event"]]:
            self.add("events", f"{job.id}: the stream has {_odd(numbers)} of {found['last_event']}")
        events = self._all_events(job)
        if missing := {event["seq"] for event in events} - set(numbers):
            self.add("events", f"{job.id}: the stream has no {sorted(missing)}")
        before = None
        for change in (event["data"] for event in events if event["kind"] == "status"):
            if change["from"] != before or (before, change["to"]) not in _EDGES:
                self.add("events", f"{job.id}: from {change['from']} to {change['to']}")
            before = change["to"]
        if before != found["status"]:
            self.add("events", f"{job.id} is {found['status']}, its last event says {before}")

    def _all_events(self, job: PostedJob) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        after = 0
        while items := self._api.get(f"/jobs/{job.id}/events", after=after, limit=500)["items"]:
            events += items
            after = items[-1]["seq"]
        return events

    def _artifacts(self, job: PostedJob, found: dict[str, Any], torn: set[str]) -> None:
        artifacts = self._api.get(f"/jobs/{job.id}/artifacts")["items"]
        kinds = {artifact["kind"] for artifact in artifacts}
        if found["status"] == "succeeded" and "model" not in kinds:
            self.add("artifacts", f"{job.id} has succeeded without a model")
        for artifact in artifacts:
            if artifact["id"] in torn:
                continue
            base = Path(urlsplit(artifact["url"]).path)
            for file in artifact["files"]:
                self.files += 1
                try:
                    digest = hashlib.sha256((base / file["path"]).read_bytes()).hexdigest()
                except OSError as error:
                    digest = str(error)
                if digest != file["sha256"]:
                    name = f"{artifact['kind']} {artifact['name']} {file['path']}"
                    self.add("artifacts", f"{job.id}: {name}: {digest}")


def _odd(steps: Sequence[int]) -> str:
    """Where a row of numbers is not one after another."""
    if not steps:
        return "none at all"
    odd = [
        f"{before} then {after}"
        for before, after in itertools.pairwise(steps)
        if after != before + 1
    ]
    return f"{steps[0]} to {steps[-1]}, {json.dumps(odd[:5])}"
