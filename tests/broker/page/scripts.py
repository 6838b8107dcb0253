"""Runner of the page's pure modules, in node where it is installed, else in a browser. Results are JSON."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.browser import chromium

ASSETS = Path(__file__).parents[3] / "broker" / "page" / "assets"
NODE = shutil.which("node")
ANSWER_S_MAX = 60.0

Call = Callable[..., Any]
"""Callable of `(module, function, *arguments)` that returns the function's result."""

# Reads one call per line, so that many calls need only one process.
LOOP = """
import { createInterface } from "node:readline";
for await (const line of createInterface({ input: process.stdin })) {
  const [url, name, given] = JSON.parse(line);
  const told = await import(url).then((module) => [module[name](...given) ?? null], (error) => String(error));
  console.log(JSON.stringify(told));
}
"""


def runnable() -> bool:
    """Return whether node or a browser is installed."""
    return NODE is not None or chromium.find() is not None


@contextlib.contextmanager
def running() -> Iterator[Call]:
    """Start node, or else a browser."""
    with _node(NODE) if NODE else _browser() as call:
        yield call


@contextlib.contextmanager
def _node(program: str) -> Iterator[Call]:
    process = subprocess.Popen(
        [program, "--input-type=module", "-e", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    reader, writer = process.stdout, process.stdin

    def call(module: str, name: str, *given: object) -> Any:
        writer.write(json.dumps([(ASSETS / module).as_uri(), name, given]) + "\n")
        writer.flush()
        timer = threading.Timer(ANSWER_S_MAX, process.kill)
        timer.start()
        try:
            line = reader.readline()
        finally:
            timer.cancel()
            timer.join()
        return _value(json.loads(line or '"it has ended"'))

    try:
        yield call
    finally:
        writer.close()
        process.wait(ANSWER_S_MAX)
        reader.close()


def _value(told: list[Any] | str) -> Any:
    assert isinstance(told, list), told
    return told[0]


@contextlib.contextmanager
def _browser() -> Iterator[Call]:
    handler = functools.partial(_Quiet, directory=str(ASSETS))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        with chromium.running() as browser:
            page = browser.open(f"http://127.0.0.1:{server.server_port}/icon.svg")

            def call(module: str, name: str, *given: object) -> Any:
                asked = f"m[{json.dumps(name)}](...{json.dumps(given)})"
                told = page.run(f"import('/{module}').then(m => JSON.stringify([{asked}]))")
                return json.loads(told)[0]

            yield call
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""
