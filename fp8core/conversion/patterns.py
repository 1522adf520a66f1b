"""The ``skip`` and ``only`` patterns of a conversion: shell globs over the names of layers.

``*`` (which crosses dots), ``?`` and ``[...]`` mean what they mean in a shell, and case counts. A
pattern must match a layer's whole name: ``model.layers.0.*`` is the first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

__all__ = ["first_match", "unmatched"]


def first_match(patterns: Sequence[str], names: Iterable[str]) -> str | None:
    """The first pattern that matches any of ``names`` (all of one layer), or None."""
    known = tuple(names)
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in known):
            return pattern
    return None


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[int]:
    """Positions in ``patterns`` of those that match none of ``names``."""
    known = tuple(names)
    return [i for i, pattern in enumerate(patterns) if first_match([pattern], known) is None]
