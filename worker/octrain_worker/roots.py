"""Which folders a job's paths may point below, on this node.

A node has roots of its own; a job's owner may have fewer. What both allow is what the trainer gets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["allowed_roots"]


def allowed_roots(node: Sequence[Path], owner: Sequence[str] | None) -> list[str]:
    """The node's roots, narrowed to the owner's where the owner has roots of their own.

    Of two folders, one within the other, the inner one is allowed; symbolic links are followed
    first, so that a link within an owner's root opens nothing. May be empty: then no path is.
    """
    if owner is None:
        return [str(root) for root in node]
    mine = [Path(os.path.realpath(root)) for root in node]
    theirs = [Path(os.path.realpath(root)) for root in owner]
    found = []
    for root in mine:
        for other in theirs:
            if other.is_relative_to(root):
                found.append(str(other))
            elif root.is_relative_to(other):
                found.append(str(root))
    return list(dict.fromkeys(found))
