"""Removes from the node's artifact store what no job needs, as the API says.

The API names a folder and the files below it that must stay. Only folders of jobs in this node's
own store are touched, whatever is named. A thread of its own does it: a store may be slow, and the
heartbeat that brings the orders must not be.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable

from fp8core.storage import ArtifactStore
from octrain_worker.api_client import LeftoverOrder

__all__ = ["LeftoverRemover", "remove_leftover"]

logger = logging.getLogger(__name__)


class LeftoverRemover:
    """Takes orders, does each once at a time, and tells which are done."""

    def __init__(self, store_url: str) -> None:
        self._url = store_url
        self._orders: queue.SimpleQueue[LeftoverOrder] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._done: list[str] = []
        threading.Thread(target=self._run, name="leftovers", daemon=True).start()

    def take(self, orders: Iterable[LeftoverOrder]) -> None:
        """Accepts orders; one that is being done already is not begun again."""
        for order in orders:
            with self._lock:
                if order.id in self._taken:
                    continue
                self._taken.add(order.id)
            self._orders.put(order)

    def done(self) -> list[str]:
        """The ids of what is gone, until ``told`` is called with them."""
        with self._lock:
            return list(self._done)

    def told(self, ids: Iterable[str]) -> None:
        """The API knows that these are gone."""
        with self._lock:
            self._done = [one for one in self._done if one not in set(ids)]
            self._taken.difference_update(ids)

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                count = remove_leftover(self._url, order)
            except Exception as error:  # every store raises its own; the API asks again
                logger.warning("%s cannot be removed from the store: %s", order.url, error)
                with self._lock:
                    self._taken.discard(order.id)
                continue
            logger.info("%d files of %s were removed from the store", count, order.url)
            with self._lock:
                self._done.append(order.id)


def remove_leftover(store_url: str, order: LeftoverOrder) -> int:
    """Removes all files below ``order.url`` but those in ``order.keep``; how many these were.

    Raises ``ValueError`` for a folder that is not one of a job in this store, and what the store
    raises.
    """
    base = store_url.rstrip("/") + "/"
    key = order.url.rstrip("/").removeprefix(base)
    if not order.url.startswith(base) or not key.startswith("jobs/") or key.count("/") < 1:
        raise ValueError(f"{order.url} is no job's folder in {store_url}")
    store = ArtifactStore(store_url)
    found = [one.key for one in store.list(key, unfinished=True)]
    keep = {f"{key}/{path}" for path in order.keep}
    if not keep:
        # With its folders, which only a store of files has.
        store.delete(key)
        return len(found)
    gone = [one for one in found if one not in keep]
    kept_folders = {folder for path in keep for folder in _folders(path)}
    for folder in sorted({folder for one in gone for folder in _folders(one)} - kept_folders):
        if folder.startswith(f"{key}/"):
            store.delete(folder)
    for one in gone:
        store.delete(one)
    return len(gone)


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
