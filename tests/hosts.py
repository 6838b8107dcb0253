"""An HTTP server on loopback with fixed answers: `serving_images` runs it in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Page = bytes | str | int | tuple[int, bytes] | None


class Images(ThreadingHTTPServer):
    """An HTTP server with one response per path.

    `pages`: bytes are the body, a string is the target of a redirect, a number is a status, perhaps with a
    body, and None never answers. `asked`: the number of requests by path and Host header. `calls`: path and
    Authorization of each request.
    """

    daemon_threads = True

    def __init__(self, pages: Mapping[str, Page]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = dict(pages)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.calls: list[tuple[str, str | None]] = []
        self.headers: list[Mapping[str, str]] = []
        self.over = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Images

    def do_GET(self) -> None:
        self.server.asked[self.path, self.headers["host"]] += 1
        self.server.calls.append((self.path, self.headers["authorization"]))
        self.server.headers.append(dict(self.headers.items()))
        match self.server.pages.get(self.path, 404):
            case bytes() as data:
                self._answer(200, data)
            case str() as location:
                self._answer(302, b"elsewhere", location)
            case int() as status:
                self._answer(status, b"a secret of this host")
            case (int() as status, bytes() as data):
                self._answer(status, data)
            case None:
                self.server.over.wait()

    def _answer(self, status: int, data: bytes, location: str = "") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if location:
            self.send_header("location", location)
        self.end_headers()
        with contextlib.suppress(OSError):  # a client may leave once it has read enough
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving_images(pages: Mapping[str, Page]) -> Iterator[Images]:
    with Images(pages) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Served:
    """Endpoint with fixed answers. `asked` has path and Authorization of each request."""

    url: str
    asked: list[tuple[str, str | None]]


@contextlib.contextmanager
def endpoint_that_answers(answers: Mapping[str, tuple[int, bytes]]) -> Iterator[Served]:
    """Run an endpoint with a status and a body per path. By default `/health` is 200 and all else 404."""
    with serving_images({"/health": (200, b'{"status": "ok"}'), **answers}) as server:
        yield Served(f"http://127.0.0.1:{server.port}", server.calls)
