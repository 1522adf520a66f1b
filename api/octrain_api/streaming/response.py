"""The answer that a live stream is sent with."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octrain_api.connections import OFFER
from octrain_api.streaming.reader import Offer, Write

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStreamResponse(Response):
    """Sends what `run` writes, as it writes it, and calls `leave` when the client has gone.

    `run` is handed a function that returns when the server has taken what was written, which it
    does once the connection has taken what came before: a client that does not read holds up its
    own stream alone. It is handed another that writes at once if nothing stands in the way.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        run: Callable[[Write, Offer], Coroutine[Any, Any, None]],
        leave: Callable[[], None],
        status_code: int = 200,
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        self._run = run
        self._leave = leave
        self.status_code = status_code
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to its end, or to the client's."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})

        async def write(chunk: bytes) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        # In tasks of their own: the application around this endpoint is dozens of coroutines deep,
        # and each wake-up would pass through all of them.
        offer = scope.get("extensions", {}).get(OFFER, _takes_nothing)
        running = asyncio.create_task(self._run(write, offer))
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await running
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            running.cancel()
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()


def _takes_nothing(body: bytes) -> bool:
    """The offer where the server has none."""
    return False
