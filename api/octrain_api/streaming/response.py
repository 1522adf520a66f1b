"""The answer that a live stream is sent with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStreamResponse(Response):
    """Sends chunks as they come, and calls `leave` when the client has gone.

    Each chunk is handed to the server only when the one before has left its buffer, so a client
    that does not read holds up its own stream alone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        leave: Callable[[], None],
        status_code: int = 200,
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        self._chunks = chunks
        self._leave = leave
        self.status_code = status_code
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to its end, or to the client's."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        watcher = asyncio.create_task(self._watch(receive))
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()
