"""How long `octrain up` takes to start and to stop, and a job from POST to its first step.

`octrain up` as a person runs it, in a folder of its own: its first start (Postgres makes its
cluster, the schema is migrated), later starts, each from the start of the process until
`GET /v1/jobs` is answered to a key; Ctrl-C with nothing running, and with a job that trains and
checkpoints first, until the process has ended. Between them jobs of one small layer, each from
before the POST until the trainer recorded step 1, by its own clock, and until a client's stream
told it. Each is posted when the node has a spare trainer that has imported all that it needs, as a
node has that ended its last start more than about 15 seconds ago.

    python benchmarks/startup.py [--starts 3] [--jobs 10]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from octrain.local.ports import free_port
from octrain.local.state import StackState

JOB: dict[str, Any] = {
    "name": "startup",
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    },
    "tokenizer": "bytes",
    "data": {"source": "builtin"},
    "recipe": {"engine": "emulated", "fp8_format": "HYBRID"},
    "training": {"steps": 20, "batch_size": 2, "sequence_length": 32},
    "evaluation": {"fraction": 0.0},
    "checkpoint": {"final": False},
}


class Up:
    """One `octrain up`; ``seconds`` until it answered a request."""

    def __init__(self, folder: Path, port: int) -> None:
        command = [sys.executable, "-m", "octrain", "up"]
        command += ["--data-dir", str(folder / "data"), "--root", str(folder), "--port", str(port)]
        self.log = folder / "up.log"
        self._log = self.log.open("wb")
        began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30)
        while True:
            try:
                key = StackState.load(folder / "data").api.key
                self.http.headers["Authorization"] = f"Bearer {key}"
                if self.http.get("/jobs").is_success:
                    break
            except (OSError, ValueError, AttributeError, httpx.HTTPError):
                pass
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.01)
        self.seconds = time.monotonic() - began

    def wait_for_a_node(self) -> None:
        """Returns when ``octrain up`` has said that its node is ready, so that nothing starts."""
        while "Nodes ready" not in self.log.read_text():
            time.sleep(0.05)

    def wait_for_a_spare(self) -> None:
        """Returns when a spare trainer waits for its order and the node is at rest."""
        used = -1.0
        while True:
            time.sleep(1.0)
            now = sum(
                sum(process.cpu_times()[:2])
                for process in psutil.Process(self.process.pid).children(recursive=True)
                if "spare" in process.cmdline()
            )
            if now == used and now > 0:
                return
            used = now

    def stop(self) -> float:
        """Seconds from Ctrl-C to the end of the process."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        if self.process.wait(60) != 0:
            raise SystemExit(f"it ended with {self.process.returncode}")
        self.http.close()
        self._log.close()
        return time.monotonic() - began

    def post(self, spec: dict[str, Any]) -> str:
        answer = self.http.post("/jobs", json=spec)
        answer.raise_for_status()
        return str(answer.json()["id"])

    def first_step(self) -> tuple[float, float]:
        """Seconds from before the POST until step 1 was recorded, and until it was told here."""
        before = time.time()
        job = self.post(JOB)
        told = 0.0
        with self.http.stream("GET", f"/jobs/{job}/stream?include=metrics") as stream:
            for line in stream.iter_lines():
                if line == "event: metrics" and not told:
                    told = time.time() - before
                if line == "event: end":
                    break
        answer = self.http.get(f"/jobs/{job}/metrics?name=train/loss&x=time&to_step=1").json()
        recorded = float(re.findall(r"\[\[(\d+\.\d+)", json.dumps(answer))[0])
        return recorded - before, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=10)
    chosen = parser.parse_args()
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        up = Up(folder, port)
        print(f"first start                 {up.seconds:5.1f} s")
        up.wait_for_a_node()
        idle = [up.stop()]
        later = []
        for number in range(chosen.starts):
            up = Up(folder, port)
            later.append(up.seconds)
            up.wait_for_a_node()
            if number < chosen.starts - 1:
                idle.append(up.stop())
        print(f"later start                 {_of(later)}")
        steps = []
        for _ in range(chosen.jobs):
            up.wait_for_a_spare()
            steps.append(up.first_step())
        print(f"POST to step 1 recorded     {_of([recorded for recorded, _ in steps])}")
        print(f"POST to step 1 told         {_of([told for _, told in steps])}")
        long = {**JOB, "training": {**JOB["training"], "steps": 100_000}}
        job = up.post({**long, "checkpoint": {"every_steps": 0, "final": True}})
        while up.http.get(f"/jobs/{job}").json()["progress"]["step"] < 10:
            time.sleep(0.05)
        print(f"Ctrl-C, nothing running     {_of(idle)}")
        print(f"Ctrl-C, a job that trains   {up.stop():5.1f} s")


def _of(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):5.1f} s   ({min(seconds):.1f} to {max(seconds):.1f})"


if __name__ == "__main__":
    main()
