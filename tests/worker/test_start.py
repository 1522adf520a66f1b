"""What a node says at its start where its operator has left something out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    paths = [str(REPOSITORY), str(REPOSITORY / "worker")]
    return subprocess.Popen(
        [sys.executable, "-m", "octrain_worker", "run", "--name", "n", "--data-dir", str(folder)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_node_without_key_and_token_says_what_to_do(tmp_path: Path) -> None:
    node = start(tmp_path)
    try:
        _, said = node.communicate(timeout=60)
    finally:
        node.kill()
        node.wait()
    assert node.returncode == 1
    assert said.startswith("this node has no key: set OCTRAIN_NODE_TOKEN")
    assert said.count("\n") == 1, said


def test_a_node_names_the_api_that_it_waits_for(tmp_path: Path) -> None:
    with socket.socket() as held:  # nobody listens there, and no other program takes it
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        for given, waits in (("KEY", "register"), ("TOKEN", "enrol")):
            secrets = {f"OCTRAIN_NODE_{given}": "octn_x"}
            node = start(tmp_path / given, OCTRAIN_API_URL=url, **secrets)
            try:
                assert node.stderr is not None
                line = next((line for line in node.stderr if "cannot" in line), "")
                assert f"the node cannot {waits} yet at {url}: POST /" in line
                node.send_signal(signal.SIGTERM)
                node.communicate(timeout=30)
            finally:
                node.kill()
                node.wait()
