"""A trainer that will not go: deaf to SIGTERM, with a family in sessions of its own.

Started as the real one is (``spare``, then one JSON line on standard input). It writes the id of
every process of the family into ``family`` of its workdir, then says that it trains, unless the
job's name is ``mute``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MEMBERS = 4  # this process, its child, the child's daemon, and the daemon's child


def main() -> None:
    assert sys.argv[1:] == ["spare"]
    line = sys.stdin.readline()
    if not line.strip():
        return
    order = json.loads(line)
    work = Path(order["workdir"])
    spec = json.loads(Path(order["spec_path"]).read_text())
    live_on(work, 0)
    with (work / "telemetry.jsonl").open("a") as telemetry:
        if spec["name"] != "mute":
            for number, record in enumerate(
                [
                    {"type": "phase", "phase": "training"},
                    {"type": "progress", "step": 1, "total_steps": spec["training"]["steps"]},
                ],
                start=1,
            ):
                telemetry.write(json.dumps({"seq": number, "time": time.time(), **record}) + "\n")
                telemetry.flush()
        while True:
            signal.pause()


def live_on(work: Path, generation: int) -> None:
    """Be deaf, start the next generation in a session of its own, and say that we are there."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if generation == 1:
        # The child leaves its own child behind: nobody's, but for the subreaper above.
        if os.fork() == 0:
            os.setsid()
            live_on(work, 2)
            while True:
                signal.pause()
    elif generation in (0, 2):
        subprocess.Popen(
            [sys.executable, __file__, str(work), str(generation + 1)], start_new_session=True
        )
    with (work / "family").open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    if sys.argv[1] == "spare":
        main()
    else:
        live_on(Path(sys.argv[1]), int(sys.argv[2]))
        while True:
            signal.pause()
