"""Local hub with the part of Hugging Face's API that `huggingface_hub` uses to fetch a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"

Files = Mapping[str, bytes]


class _Handler(BaseHTTPRequestHandler):
    models: Mapping[str, Files]
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.asked.append(f"{self.command} {path}")
        for model, files in self.models.items():
            name = path.removeprefix(f"{model}/resolve/").partition("/")[2]
            if path.startswith(f"{model}/resolve/") and name in files:
                self._send_file(files[name], body=body)
                return
            if path.startswith(f"api/models/{model}/tree/"):
                self._send([_entry(name, data) for name, data in files.items()])
                return
            if path in (f"api/models/{model}", f"api/models/{model}/revision/main"):
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                self._send({"id": model, "modelId": model, "sha": SHA, "siblings": siblings})
                return
        self._send({"error": "Repository not found"}, 404, [("X-Error-Code", "RepoNotFound")])

    def _send(
        self, document: object, status: int = 200, headers: list[tuple[str, str]] | None = None
    ) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in [*(headers or []), ("Content-Length", str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _send_file(self, data: bytes, *, body: bool) -> None:
        begin = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(data[begin:])


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextlib.contextmanager
def hub_that_has(models: Mapping[str, Files]) -> Iterator[tuple[str, list[str]]]:
    """Run a hub with these models. Yields its URL and the list of its requests."""

    class Handler(_Handler):
        """Handler class with the state of this server, because the server instantiates handlers itself."""

    Handler.models, Handler.asked = models, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Handler.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
