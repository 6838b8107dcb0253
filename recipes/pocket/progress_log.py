"""Training log in a file."""

from __future__ import annotations

import time
from pathlib import Path

from recipes.pocket import together

_EVERY = 20


class ProgressLog:
    """Appends a line to `path` every `_EVERY` steps: their mean loss, and the steps per second so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began, self._steps, self._losses = time.monotonic(), 0, 0.0

    def step(self, number: int, what: str, loss: float) -> None:
        self._steps += 1
        self._losses += loss
        if number % _EVERY == 0:
            speed = self._steps / (time.monotonic() - self._began)
            self.line(f"{what} {number} loss {self._losses / _EVERY:.4f} {speed:.2f} steps/s")
            self._losses = 0.0

    def line(self, text: str) -> None:
        if together.number():
            return
        with self._path.open("a", encoding="utf-8") as log:
            print(time.strftime("%H:%M:%S"), text, file=log)
