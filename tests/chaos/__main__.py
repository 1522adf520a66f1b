"""Random faults at a real service: ``python -m tests.chaos --seed 1 --duration 600 --jobs 50``.

Prints each fault with its second, and at the end the faults survived, what was lost, and what
became of the jobs. Exit status 1 when anything was lost, or when so few faults found a victim that
the run says little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octrain.local.leftovers import processes_of
from octrain.local.processes import become_subreaper
from tests.chaos.faults import Faults
from tests.chaos.losses import KINDS, Losses
from tests.chaos.reference import References
from tests.chaos.schedule import draw_faults, draw_users
from tests.chaos.stack import LEASE_SECONDS, SETTINGS, ChaosStack
from tests.chaos.users import Api, Users
from tests.chaos.watch import TrainerWatch

NODES = ("north", "east", "south")
_TICK_SECONDS = 0.05
_QUIET_SECONDS = 60.0
_WORKERS_STOP_SECONDS = 30.0
# A run shows something with so many faults, one in so many seconds, of so many kinds.
_LEAST_SECONDS_EACH = 6.0
_LEAST_KINDS = 6


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    faults: Counter[str]
    jobs: int
    losses: Losses
    duration: float

    @property
    def lost(self) -> int:
        return self.losses.counts.total()

    @property
    def too_few(self) -> str | None:
        """What is missing of the faults that make this a trial."""
        least = int(self.duration / _LEAST_SECONDS_EACH)
        kinds = min(_LEAST_KINDS, least)
        if self.faults.total() >= least and len(self.faults) >= kinds:
            return None
        return (
            f"{self.faults.total()} faults of {len(self.faults)} kinds, and {self.duration:g} s "
            f"must have {least} of {kinds}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of faults")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument(
        "--settle",
        type=float,
        default=180.0,
        help="seconds after which an open job without a change is lost",
    )
    parser.add_argument("--folder", type=Path, help="where all files go, and stay")
    parser.add_argument("--schedule", action="store_true", help="only print what would be done")
    options = parser.parse_args(arguments)
    if options.schedule:
        for fault in draw_faults(options.seed, options.duration):
            print(f"{fault.at:7.1f} s  {fault}")
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="octrain-chaos-"))
    result = run(folder, options.seed, options.duration, options.jobs, options.settle)
    if options.folder is None and not (result.lost or result.too_few):
        shutil.rmtree(folder)
    else:
        print(f"All files of the run: {folder}")
    if result.too_few:
        print(f"too few: {result.too_few}")
    return 1 if result.lost or result.too_few else 0


def run(folder: Path, seed: int, duration: float, jobs: int, settle: float) -> Result:
    """One run in ``folder``, which must be empty or absent; to be called by the main thread."""
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    print(f"seed {seed}, {duration:g} s, {jobs} jobs, leases of {LEASE_SECONDS} s\n{settings}")
    root = corpus(folder / "root")
    references = References(folder / "references", root, jobs)
    stack = ChaosStack(folder / "data", roots=[root], nodes=NODES)
    watch = TrainerWatch(stack.data_dir)
    try:
        stack.start()
        references.finish()
        api = Api(stack.urls, stack.api_key)
        watch.start()
        faults, users = _storm(stack, api, seed, duration, jobs)
        _settle(stack, users, settle)
        losses = Losses(api, references.of(users.jobs))
        _judge(stack, users, faults, losses)
        api.close()
        _stop_nodes(stack, losses)
    finally:
        references.close()
        if watch.looks:
            watch.stop()
        stack.stop()
    for line in watch.doubles.values():
        losses.add("doubles", line)
    for pid in sorted({*processes_of(stack.data_dir), *watch.living()}):
        losses.add("processes", f"{pid} outlives the whole service: {_command(pid)}")
    struck = Counter(fault.kind for fault in faults.struck)
    result = Result(struck, len(users.jobs), losses, duration)
    _report(result, users, faults, watch)
    return result


def _storm(
    stack: ChaosStack, api: Api, seed: int, duration: float, jobs: int
) -> tuple[Faults, Users]:
    """All faults, done and undone."""
    if not stack.wait_for_nodes():
        raise RuntimeError("the nodes have not registered in time")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    posts, actions = draw_users(seed, duration, jobs)
    users = Users(api, posts, actions, began)
    faults = Faults(stack, users, began, say)
    users.start()
    faults.plan(draw_faults(seed, duration))
    while time.monotonic() < began + duration or not faults.idle:
        faults.tick()
        stack.reap()
        time.sleep(_TICK_SECONDS)
    faults.close()
    say("all faults are over")
    users.finish()
    return faults, users


def _settle(stack: ChaosStack, users: Users, seconds: float) -> None:
    """Until every job is final, or nothing has changed for so long, or four times as long is over:
    a slow machine loses nothing."""
    began = changed = time.monotonic()
    before: list[tuple[Any, ...]] = []
    while time.monotonic() < min(changed + seconds, began + 4 * seconds):
        stack.reap()
        users.resume_all()
        objects = [users.api.get(f"/jobs/{job.id}") for job in users.jobs]
        now = [
            (found["id"], found["status"], len(found["attempts"]), found["progress"]["step"])
            for found in objects
            if not found["is_final"]
        ]
        if not now:
            break
        if now != before:
            before, changed = now, time.monotonic()
        time.sleep(1.0)
    print(f"{time.monotonic() - began:.1f} s to let what is open end")


def _judge(stack: ChaosStack, users: Users, faults: Faults, losses: Losses) -> None:
    for line in users.refused:
        losses.add("posts", line)
    deadline = time.monotonic() + _QUIET_SECONDS
    while left := _left_over(users, faults):
        if time.monotonic() > deadline:
            for kind, line in left:
                losses.add(kind, line)
            break
        stack.reap()
        time.sleep(0.2)
    node = stack.nodes[-1] if stack.small_disk is not None else None
    for job in users.jobs:
        losses.check(job, full_disk=node, torn=faults.torn)
    for line, count in users.api.wrong.items():
        losses.add("answers", f"{count} times {line}")


def _stop_nodes(stack: ChaosStack, losses: Losses) -> None:
    """Ends the nodes as their owner would. What then lives besides our servers is left over; the
    stack's own stop would end it, and nobody would know."""
    workers = [stack.process(f"worker-{node}") for node in stack.nodes]
    for worker in workers:
        worker.request_stop()
    deadline = time.monotonic() + _WORKERS_STOP_SECONDS
    for worker in workers:
        if not worker.wait(deadline):
            losses.add("processes", f"{worker.name} does not stop")
    stack.reap()
    for pid in processes_of(stack.data_dir, stack.pids()):
        losses.add("processes", f"{pid} outlives its node: {_command(pid)}")


def _left_over(users: Users, faults: Faults) -> list[tuple[str, str]]:
    """What the end of all jobs leaves: trainers, supervisors, slots."""
    left = [("processes", f"trainer {one.pid} of {one.attempt}") for one in faults.trainers()]
    left += [("processes", f"supervisor {one}") for one in faults.supervisors()]
    for node in users.api.get("/nodes")["items"]:
        if node["cpu_slots_used"]:
            left.append(("slots", f"{node['cpu_slots_used']} of {node['name']}"))
    return left


def _report(result: Result, users: Users, faults: Faults, watch: TrainerWatch) -> None:
    losses = result.losses
    print(f"\nfaults survived: {result.faults.total()}")
    for kind, count in sorted(result.faults.items()):
        print(f"  {count:4d}  {kind}")
    if faults.missed:
        missed = Counter(fault.kind for fault in faults.missed)
        print(f"  found nothing to hit: {dict(missed)}")
    print(f"users: {dict(users.done)}")
    print(f"jobs: {result.jobs}, {dict(losses.outcomes)}")
    print(
        f"attempts: {losses.attempts}, restarts counted: {losses.restarts}, {dict(losses.reasons)}"
    )
    print(
        f"looked at: {losses.steps} steps, {losses.files} files, {watch.looks} times at all "
        f"processes ({watch.seen} in all, up to {watch.most} jobs trained at once)"
    )
    print(f"losses: {result.lost}")
    for kind, what in KINDS.items():
        print(f"  {losses.counts[kind]:4d}  {kind}: {what}")
    for line in losses.lines:
        print(f"LOST  {line}")


def corpus(folder: Path) -> Path:
    """A root with a little text to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"line {number} of a text that says {number * 7 % 13} again" for number in range(400)]
    (folder / "corpus.txt").write_text("\n".join(words))
    return folder


def _command(pid: int) -> Any:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "gone"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
