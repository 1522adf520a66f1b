"""Libraries that the base installation does not bring, loaded when they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from octrain.client.errors import MissingExtra

__all__ = ["library"]


def library(name: str) -> Any:
    """The module of this name. Raises ``MissingExtra``, with what to install, where it is not."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingExtra(
            f"This needs {name}: pip install 'octrain[analysis]', or {name} alone."
        ) from None
