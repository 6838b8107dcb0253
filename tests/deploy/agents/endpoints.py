"""Small HTTP server with fixed answers, which records its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

STOP_WAIT_S = 10.0


@dataclass
class Served:
    """Running server. `asked` has path and Authorization of each request."""

    url: str
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@contextmanager
def endpoint_that_answers(answers: Mapping[str, tuple[int, bytes]]) -> Iterator[Served]:
    """Run a server with a status and a body per path. By default `/health` is 200 and all else 404."""
    served = Served("")
    known = {"/health": (200, b'{"status": "ok"}'), **answers}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append((self.path, self.headers["Authorization"]))
            status, body = known.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join(STOP_WAIT_S)
