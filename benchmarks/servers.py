"""Servers as processes of their own, for what is measured and for its peers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Run a server while in the context; its host:port, as it says on standard error."""
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "running on http://" in line:
                yield line.split("http://")[1].split()[0]
                break
        else:
            raise RuntimeError(f"{command} did not start")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def serve_bare(app: FastAPI) -> None:
    """Serve a peer on a free port of loopback, with the loop and the parser of our own server."""
    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(f"running on http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, access_log=False, log_config=None, http="httptools", loop="uvloop")
    uvicorn.Server(config).run([listening])
