"""The methods of the asynchronous classes, for callers that wait.

A class that waits holds its asynchronous twin, over a blocking exchange, as ``_twin``; these turn
a method of the twin's class into one of its own with the same parameters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from octrain.client.http import drive, iterate

P = ParamSpec("P")
T = TypeVar("T")


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A method that returns the coroutine's result."""

    @wraps(method)
    def wait(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return drive(method(self._twin, *args, **kwargs))

    return wait


def iterating(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """A method that gives the asynchronous iterator's items."""

    @wraps(method)
    def each(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return iterate(method(self._twin, *args, **kwargs))

    return each
