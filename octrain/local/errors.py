"""What can go wrong with the local stack, said for a person."""

from __future__ import annotations


class LocalStackError(Exception):
    """A server of the local stack cannot start or stop; the message says what to do."""


class BinariesMissing(LocalStackError):
    """No usable Postgres or Valkey program was found on this machine."""


class DataFolderInUse(LocalStackError):
    """Another stack runs on the same data folder."""
