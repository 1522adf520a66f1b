"""A session for code that waits for each answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from octrain.client.errors import OctrainError
from octrain.client.http import drive
from octrain.client.session import Session


class Transport:
    """Requests of a session over the blocking exchange."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """As ``Session.request``."""
        return drive(
            self.session.request(
                method,
                path,
                json=json,
                content=content,
                params=params,
                headers=headers,
                timeout=timeout,
                repeatable=repeatable,
            )
        )


class LoopTransport(Transport):
    """The same for a worker thread, over a session that belongs to an event loop.

    ``end`` makes the next request raise, so that a thread whose caller was cancelled comes to an
    end.
    """

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(session)
        self._loop = loop
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """As ``Session.request``."""
        if self._ended.is_set():
            raise OctrainError("The upload was cancelled.")
        asked = self.session.request(method, path, **options)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
