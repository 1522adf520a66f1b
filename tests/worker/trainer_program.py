"""A trainer that does as its spec's ``script`` says, and keeps the workdir contract.

Started like the real one (``spare``, one JSON line on stdin), it writes telemetry, checkpoints and
a result, and misbehaves where asked to: ignores SIGTERM, leaves processes in sessions of their own,
crashes, prints without end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

stop_asked = False


def on_term(_number: int, _frame: object) -> None:
    global stop_asked
    if stop_asked:
        os._exit(10)
    stop_asked = True


class Telemetry:
    def __init__(self, work: Path) -> None:
        self._file = (work / "telemetry.jsonl").open("a")
        self._seq = 0

    def write(self, **record: Any) -> None:
        self._seq += 1
        self._file.write(json.dumps({"seq": self._seq, "time": time.time(), **record}) + "\n")
        self._file.flush()


def checkpoint(work: Path, telemetry: Telemetry, step: int, kind: str) -> None:
    folder = work / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    data = f"state of step {step}".encode() * 100
    (folder / "state.json").write_bytes(data)
    files = [{"path": "state.json", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
    manifest = {"complete": True, "step": step, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    telemetry.write(
        type="checkpoint",
        step=step,
        path=f"checkpoints/{folder.name}",
        kind=kind,
        best=False,
        metric=None,
    )


def result(work: Path, outcome: str, reason: str, step: int, code: int, detail: str = "") -> None:
    value = {"outcome": outcome, "reason": reason, "detail": detail, "step": step}
    partial = work / ".result"
    partial.write_text(json.dumps({**value, "exit_code": code}))
    partial.replace(work / "result.json")
    sys.exit(code)


def newest_step(work: Path) -> int:
    steps = [int(path.name.split("-")[1]) for path in work.glob("checkpoints/step-*")]
    return max(steps, default=0)


def spawn_family(pids: Path) -> None:
    """A child that leaves, and its child in a session of its own, deaf to SIGTERM."""
    deaf = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", parent], check=True)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.01)


def main() -> None:
    assert sys.argv[1:] == ["spare"]
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    os.environ.update(order.get("env", {}))
    work = Path(order["workdir"])
    script = json.loads(Path(order["spec_path"]).read_text()).get("script", {})
    (work / "order.json").write_text(line)
    telemetry = Telemetry(work)
    if script.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, on_term)
    if script.get("family"):
        spawn_family(Path(script["family"]))
    if script.get("dump_environment"):
        Path(script["dump_environment"]).write_text(json.dumps(dict(os.environ)))
    for text in script.get("print", []):
        print(text, flush=True)
    for name in script.get("print_variables", []):
        print(f"{name} is {os.environ[name]}", flush=True)
    for text in script.get("print_errors", []):
        print(text, file=sys.stderr, flush=True)
    for number in range(script.get("flood_lines", 0)):
        print(f"{number:09d} " + "x" * 89)
    telemetry.write(type="phase", phase="training")
    steps = script.get("steps", 5)
    for step in range(newest_step(work) + 1, steps + 1):
        time.sleep(script.get("step_seconds", 0.01))
        telemetry.write(type="metrics", step=step, values={"train/loss": 1.0 / step})
        telemetry.write(
            type="progress", step=step, total_steps=steps, tokens=step * 10, eta_seconds=None
        )
        if "flood" in script:
            sys.stdout.write(f"{step:07d} {'.' * 91}\n" * (script["flood"] // 100))
            sys.stdout.flush()
        if step == script.get("kill_at"):
            os.kill(os.getpid(), script.get("kill_with", signal.SIGKILL))
        if step == script.get("exit_at"):
            sys.exit(script["exit_code"])
        if step == script.get("raise_at"):
            raise RuntimeError(script["raise"])
        if step == script.get("eat_memory_at"):
            eaten = []
            while True:
                eaten.append(b"x" * (8 << 20))
        if script.get("checkpoint_every") and step % script["checkpoint_every"] == 0:
            checkpoint(work, telemetry, step, "periodic")
        if stop_asked:
            checkpoint(work, telemetry, step, "stop")
            result(work, "stopped", "stopped_by_request", step, 10)
    if "fail_with" in script:
        reason, code = script["fail_with"]
        result(work, "failed", reason, steps, code, "as the script says")
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    (work / "report.json").write_text("{}")
    telemetry.write(type="artifact", kind="model", path="model", step=steps)
    telemetry.write(type="artifact", kind="report", path="report.json", step=steps)
    result(work, "succeeded", "completed", steps, 0)


if __name__ == "__main__":
    main()
