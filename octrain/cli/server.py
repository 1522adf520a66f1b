"""`octrain up`, `migrate`"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from octrain.cli.context import console
from octrain.cli.render import table
from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack
from octrain.local.state import STATE_FILE, default_data_dir

DEFAULT_PORT = 8642


def up(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where databases, logs and artifacts are kept. "
            "Default: OCTRAIN_DATA_DIR, else ~/.local/share/octrain.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address that the API listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The API's port; 0 for any.")
    ] = DEFAULT_PORT,
    root: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder that jobs may read models and data from; may be repeated. "
            "Default: the current folder.",
            show_default=False,
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="The name of a node to run here; may be repeated. Default: local.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the whole service on this machine until Ctrl-C.

    Starts Postgres and Valkey (or uses DATABASE_URL and REDIS_URL), the API, the controller and a
    worker. On Ctrl-C running jobs checkpoint first, and go on at the next start.
    """

    began = time.monotonic()
    stop = threading.Event()
    starting = True

    def asked_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()
        if starting:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, asked_to_stop)
    become_subreaper()
    stack = LocalStack(
        data_dir or default_data_dir(),
        host=host,
        port=port,
        roots=_roots(root),
        workers=worker or ["local"],
        database_url=os.environ.get("DATABASE_URL"),
        redis_url=os.environ.get("REDIS_URL"),
        artifact_url=os.environ.get("OCTRAIN_ARTIFACT_URL"),
        on_event=lambda message: console.print(message, markup=False, highlight=False),
    )
    with stack:
        starting = False
        _announce(stack, time.monotonic() - began)
        stack.run(stop)
        console.print("Stopping; running jobs checkpoint first.")
        stopping = time.monotonic()
    console.print(f"Stopped in {time.monotonic() - stopping:.1f} s.", highlight=False)


def _roots(given: list[Path] | None) -> list[Path]:
    roots = given or [Path.cwd()]
    for folder in roots:
        if not folder.is_dir():
            raise typer.BadParameter(f"--root {folder} is no folder")
    return roots


def _announce(stack: LocalStack, seconds: float) -> None:
    facts = table("", "")
    facts.show_header = False
    facts.add_row("API", stack.url)
    facts.add_row("dashboard", f"{stack.url}/dashboard")
    facts.add_row("reference", f"{stack.url}/docs")
    if stack.created_key:
        facts.add_row("API key", f"{stack.api_key}  (shown once; octrain finds it on this machine)")
    else:
        kept = escape(str(stack.data_dir / STATE_FILE))
        facts.add_row(
            "API key", f"as before  (octrain finds it on this machine: api.key in {kept})"
        )
    facts.add_row("data", escape(str(stack.data_dir)))
    facts.add_row("jobs may read", escape(", ".join(map(str, stack.roots))))
    facts.add_row("logs", escape(str(stack.logs)))
    if stack.data_dir != default_data_dir().absolute():
        # The other commands find URL and key in the default folder alone.
        chosen = shlex.quote(str(stack.data_dir))
        command = f"export OCTRAIN_DATA_DIR={chosen}"
        facts.add_row("other shells", escape(f"{command}  (octrain finds it there then)"))
    console.print(f"Octrain is ready after {seconds:.1f} s.", highlight=False)
    console.print(facts, soft_wrap=True)


def migrate() -> None:
    """Bring the database at DATABASE_URL to this version's schema."""
    from octrain.local.commands import module, require_servers

    require_servers()
    if not os.environ.get("DATABASE_URL"):
        raise typer.BadParameter(
            "Set DATABASE_URL to the database to migrate. "
            "The local stack's own is migrated by `octrain up`."
        )
    raise typer.Exit(subprocess.run(module("octrain_api", "migrate")).returncode)
