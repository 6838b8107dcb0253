"""A TCP proxy that cuts connections after some bytes of the response, in threads."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator

CHUNK_BYTES = 1024


class CuttingProxy:
    """Forwards connections to a port of this machine. `cuts`: for each connection, the bytes of its response
    after which it is reset; connections after them are not cut."""

    def __init__(self, target: int) -> None:
        self.cuts: list[int] = []
        self.exchanges: list[tuple[bytearray, bytearray]] = []
        """What the client has sent and received on each connection."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                sent, received = bytearray(), bytearray()
                self.exchanges.append((sent, received))
                server = socket.create_connection(("127.0.0.1", self._target))
                self._start(self._forward, client, server, sent)
                left = self.cuts.pop(0) if self.cuts else math.inf
                self._start(self._answer, server, client, left, received)

    def _forward(self, client: socket.socket, server: socket.socket, sent: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                sent += data
                server.sendall(data)
        _close(server)

    def _answer(self, server: socket.socket, client: socket.socket, left: float, received: bytearray) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := server.recv(int(min(CHUNK_BYTES, left)))):
                client.sendall(data)
                received += data
                left -= len(data)
        _close(client)
        _close(server)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)


def _close(end: socket.socket) -> None:
    """Close both directions, so that the thread that reads from it ends too."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def cutting(target: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
