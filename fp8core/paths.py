"""Where a spec's paths lead, and that they stay below the allowed roots.

A spec comes from a stranger; the roots come from the operator of the machine. With roots, whatever
a path leads to after every symbolic link must lie below one of them; without roots (somebody at
their own machine) any path is fine. A path outside is refused in the same words whether or not it
exists, so that a spec cannot be used to probe a machine's files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fp8core.errors import SpecRefused, TrainingError

__all__ = ["is_below", "resolve_path", "resolve_roots"]


def resolve_path(
    path: str | os.PathLike[str],
    roots: Sequence[str | os.PathLike[str]] = (),
    base: str | os.PathLike[str] | None = None,
    *,
    pointer: str | None = None,
    missing: type[TrainingError] = SpecRefused,
) -> Path:
    """The existing file or folder that ``path`` names, absolute and free of symbolic links.

    With ``roots``, a relative path is looked up below each in order, and the result must lie below
    (or be) one of them. Without, it is relative to ``base`` (default: the working directory).

    Raises ``SpecRefused`` for a path outside the roots or one that is no path at all, and
    ``missing`` (an error class, so that data and models fail for their own reason) when nothing is
    there; both carry ``pointer``.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise SpecRefused("the path is empty or holds a NUL character", pointer=pointer)
    allowed = resolve_roots(roots)
    if not allowed:
        candidate = Path(base if base is not None else Path.cwd()) / text
        found = _resolve_existing(candidate)
        if found is None:
            raise missing(f"no such file or folder: {candidate}", pointer=pointer)
        return found

    candidates = [Path(text)] if os.path.isabs(text) else [root / text for root in allowed]
    outside = False
    for candidate in candidates:
        # Where the path would lead is decided before asking whether anything is there.
        leads_to = Path(os.path.realpath(candidate))
        if not is_below(leads_to, allowed):
            outside = True
            continue
        found = _resolve_existing(candidate)
        # Resolved twice: what is returned is what was checked, even if a link changed between.
        if found is not None and is_below(found, allowed):
            return found
    if outside:
        raise SpecRefused(f"{text!r} lies outside the allowed roots", pointer=pointer)
    raise missing(f"no such file or folder below the allowed roots: {text!r}", pointer=pointer)


def resolve_roots(roots: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """The roots as absolute paths without symbolic links, in their order."""
    return tuple(Path(os.path.realpath(root)) for root in roots)


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether an already resolved ``path`` is one of the resolved ``roots`` or lies below one."""
    return any(path == root or root in path.parents for root in roots)


def _resolve_existing(candidate: Path) -> Path | None:
    try:
        return candidate.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return None
