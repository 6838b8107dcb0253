"""Runner of the page's pure modules in node. Results are JSON."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Return whether node is installed."""
    return NODE is not None


@contextlib.contextmanager
def running() -> Iterator[Call]:
    """Start node."""
    assert NODE is not None
    process = subprocess.Popen(
        [NODE, "--input-type=module", "-e", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        told = json.loads(line or '"it has ended"')
        assert isinstance(told, list), told
        return told[0]

    try:
        yield call
    finally:
        writer.close()
        process.wait(ANSWER_S_MAX)
        reader.close()
