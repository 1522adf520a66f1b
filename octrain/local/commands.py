"""The commands of our own servers and the environment each gets."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from octrain.local.errors import LocalStackError

STACK_VARIABLE = "OCTRAIN_STACK"
# What the person who starts the stack may have set for other purposes, and no child may inherit.
_SECRETS = ("DATABASE_URL", "REDIS_URL", "OCTRAIN_API_KEY", "OCTRAIN_NODE_KEY", "OCTRAIN_API_URL")


def module(name: str, *arguments: str) -> list[str]:
    """``python -m name …`` with this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def require_servers() -> None:
    """Errors: LocalStackError when the server packages are not installed."""
    missing = [n for n in ("octrain_api", "octrain_worker") if importlib.util.find_spec(n) is None]
    missing += [n for n in ("fastapi", "celery", "psycopg") if importlib.util.find_spec(n) is None]
    if missing:
        raise LocalStackError(
            f"The server is not installed here (no {', '.join(missing)}). "
            "Install it with `pip install 'octrain[local]'`."
        )


def base_environment(data_dir: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without secrets, with the mark of this stack and a path to our packages."""
    environment = {k: v for k, v in os.environ.items() if k not in _SECRETS}
    environment["PYTHONUNBUFFERED"] = "1"
    environment[STACK_VARIABLE] = str(data_dir)
    folders = [folder for folder in _package_folders() if "site-packages" not in folder]
    if inherited := environment.get("PYTHONPATH"):
        folders += [f for f in inherited.split(os.pathsep) if f not in folders]
    if folders:
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment.update(extra)
    return environment


def _package_folders() -> list[str]:
    """Where our packages lie: a checkout may be on sys.path without being installed."""
    found: list[str] = []
    for name in ("octrain", "octrain_api", "octrain_worker", "fp8core"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = str(Path(spec.origin).parent.parent)
            if folder not in found:
                found.append(folder)
    return found
