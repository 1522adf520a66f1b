"""``python -m octrain_worker``: ``run`` is a node, ``supervise`` one attempt on it."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octrain_worker.logs import configure
from octrain_worker.settings import ApiSettings, NodeSettings, WorkerSettings


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    configure()
    if options.command == "engines":
        from octrain_worker.capabilities import print_engines

        print_engines(options.device)
        return 0
    settings = _settings(options)
    if options.command == "run":
        return _run(settings)
    return _supervise(settings, options)


def _run(settings: WorkerSettings) -> int:
    from octrain_worker.agent.node import Node
    from octrain_worker.api_client import ApiRefused
    from octrain_worker.enrolment import with_node_key
    from octrain_worker.tracing import check_tracing

    untraceable = check_tracing(settings.tracing)
    if untraceable is not None:
        print(untraceable, file=sys.stderr)
        return 1
    settings.node.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(
        settings.node.data_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another worker runs with --data-dir {settings.node.data_dir}", file=sys.stderr)
        return 1
    try:
        settings = with_node_key(settings)
        if not settings.api.node_key.get_secret_value():
            print(
                "this node has no key: set OCTRAIN_NODE_TOKEN to a token, which `octrain nodes "
                "token` makes, or `python -m octrain_api create-node-token` beside the database",
                file=sys.stderr,
            )
            return 1
        node = Node(settings)
        node.install_signal_handlers()
        if not node.start():
            return 0
    except ApiRefused as error:
        print(f"the API does not take this node: {error}", file=sys.stderr)
        return 1
    from octrain_worker.celery_app import run_worker

    return run_worker(settings, node)


def _supervise(settings: WorkerSettings, options: argparse.Namespace) -> int:
    from octrain_worker.supervisor.main import Assignment, supervise, supervise_when_told

    if options.idle:
        return supervise_when_told(settings, options.node_id)
    if options.attempt is None or options.job is None:
        print("supervise needs --idle, or --attempt and --job", file=sys.stderr)
        return 2
    assignment = Assignment(options.attempt, options.job, options.number)
    return supervise(settings, options.node_id, assignment)


def _settings(options: argparse.Namespace) -> WorkerSettings:
    """The environment's settings, with what the command line says in their place."""
    api: dict[str, Any] = {"api_url": options.api} if options.api else {}
    node: dict[str, Any] = {"data_dir": options.data_dir} if options.data_dir else {}
    if options.command == "run":
        if options.name:
            node["name"] = options.name
        if options.cpu_slots is not None:
            node["cpu_slots"] = options.cpu_slots
    return WorkerSettings(api=ApiSettings(**api), node=NodeSettings(**node))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octrain_worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--api", metavar="URL", help="the API (OCTRAIN_API_URL)")
    common.add_argument("--data-dir", type=Path, help="local folder (OCTRAIN_WORKER_DATA_DIR)")

    run = commands.add_parser("run", parents=[common], help="register this node and take its jobs")
    run.add_argument("--name", help="the node's name (OCTRAIN_WORKER_NAME; default: the host's)")
    run.add_argument("--cpu-slots", type=int, help="jobs at a time without a GPU")

    supervise = commands.add_parser("supervise", parents=[common], help="supervise one attempt")
    supervise.add_argument("--node-id", required=True)
    supervise.add_argument("--idle", action="store_true", help="read the attempt from stdin")
    supervise.add_argument("--attempt", metavar="ID")
    supervise.add_argument("--job", metavar="ID")
    supervise.add_argument("--number", type=int, default=1, help="which attempt of the job it is")

    engines = commands.add_parser("engines", help="print which precision engines work here")
    engines.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
