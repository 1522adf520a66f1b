"""A network that can be cut: a TCP proxy between a node and the API.

``pass`` forwards. The other states are the ways in which a network is not there:

``refuse``     nobody listens, and connections that were open are reset
``reset``      connections are taken and reset at once
``blackhole``  everything opens and stays open, and no byte comes through
``unanswered`` what a node asks comes through, and no answer does

What a black hole swallowed comes through when it is over, as packets that were sent again would: a
request of before the cut reaches the API after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

__all__ = ["CuttableProxy", "State"]

State = Literal["pass", "refuse", "reset", "blackhole", "unanswered"]
LOOPBACK = "127.0.0.1"
_BYTES = 1 << 16


class CuttableProxy:
    """Listens on a port of its own and hands connections to the targets in turn.

    A target that refuses is passed over for the next. Its loop runs in a thread of its own.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets = list(targets)
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._state: State = "pass"
        # What lets bytes through, to the targets and from them.
        self._open = asyncio.Event()
        self._open.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._do(self._listen())

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def state(self) -> State:
        return self._state

    def become(self, state: State) -> None:
        """Change over, for connections that are open too."""
        self._do(self._become(state))

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._serve, LOOPBACK, self.port, reuse_address=True
            )
            self.port = int(self._server.sockets[0].getsockname()[1])

    async def _become(self, state: State) -> None:
        self._state = state
        if state == "blackhole":
            self._open.clear()
        if state in ("blackhole", "unanswered"):
            self._answering.clear()
        if state == "refuse" and self._server is not None:
            self._server.close()
            self._server = None
        if state in ("refuse", "reset"):
            self._reset_all()
        if state != "refuse":
            await self._listen()
        if state != "blackhole":
            self._open.set()
        if state not in ("blackhole", "unanswered"):
            self._answering.set()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            if self._state in ("refuse", "reset"):
                return
            await self._open.wait()
            there = await self._connect()
            if there is None:
                return
            ends.append(there[1])
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, there[1], self._open))
                both.create_task(self._pump(there[0], writer, self._answering))
        except (asyncio.CancelledError, ExceptionGroup, OSError):
            pass
        finally:
            self._tasks.discard(task)
            for end in ends:
                _reset(end)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        first = next(self._turn)
        for offset in range(len(self._targets)):
            target = self._targets[(first + offset) % len(self._targets)]
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(LOOPBACK, target)
        return None

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: asyncio.Event
    ) -> None:
        """One direction, until either end closes; then the connection is over for both."""
        while True:
            data = await reader.read(_BYTES)
            await through.wait()
            if not data:
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: what is on its way is lost, as with a cable that is pulled."""
    transport = writer.transport
    plain = transport.get_extra_info("socket")
    if plain is not None:
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
