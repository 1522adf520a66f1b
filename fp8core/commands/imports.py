"""Large libraries imported without the garbage collector's help, of which imports need none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """No garbage collection within the block, and none later of what exists at its end.

    torch and transformers make some hundred thousand objects that stay. Walking them again and
    again takes a fifth of the time of their import, and later holds up a step now and then.
    Source: https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
