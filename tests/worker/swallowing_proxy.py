"""A TCP proxy that can go deaf: connections stay open, new ones are accepted, and nothing passes.

What a half-open connection looks like from inside: a router that forgot it, a peer that lost power.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class SwallowingProxy:
    """Forwards to ``target`` on loopback until ``swallowing`` is set."""

    def __init__(self, target: int) -> None:
        self.swallowing = threading.Event()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.swallowing.is_set():
                    sink.sendall(data)
            if not self.swallowing.is_set():
                sink.shutdown(socket.SHUT_WR)
