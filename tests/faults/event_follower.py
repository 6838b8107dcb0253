"""A client that follows a response in the background by its events, over deaths of the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.system import NO_TLS

WAIT_S_MAX = 180.0
RETRY_S = 0.05


class EventFollower(threading.Thread):
    """Reads events, and goes on behind the last one after each death.

    `serving`: whether the server is there; it is cleared, with `lock`, before the server is killed. Only an
    event that was read before counts: then `on_event` is called, with `lock`. `wrong`: what went wrong.
    """

    def __init__(
        self, url: str, id: str, serving: threading.Event, lock: threading.Lock, on_event: Callable[[], None]
    ) -> None:
        super().__init__()
        self.id = id
        self.events: list[dict[str, Any]] = []
        self.wrong = ""
        self._url = f"{url}/v1/responses/{id}"
        self._serving, self._lock, self._on_event = serving, lock, on_event

    @property
    def text(self) -> str:
        return "".join(e["delta"] for e in self.events if e["type"] == "response.output_text.delta")

    @property
    def is_complete(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] == "response.completed"

    def run(self) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not (self.is_complete or self.wrong):
            if not self._serving.wait(WAIT_S_MAX) or time.monotonic() > deadline:
                self.wrong = f"no end within {WAIT_S_MAX} s"
                return
            try:
                self._follow()
            except httpx.TransportError:
                threading.Event().wait(RETRY_S)

    def _follow(self) -> None:
        after = {"starting_after": str(len(self.events) - 1)} if self.events else {}
        with httpx.stream(
            "GET", self._url, params={"stream": "true"} | after, timeout=WAIT_S_MAX, verify=NO_TLS
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                self.wrong = f"{answer.status_code}: {answer.text:.200}"
                return
            for line in answer.iter_lines():
                if line.startswith("data: ") and not self._take(json.loads(line[6:])):
                    return

    def _take(self, event: dict[str, Any]) -> bool:
        """Add an event; return whether to read on."""
        with self._lock:
            if not self._serving.is_set():
                return False
            self._on_event()
        if event["sequence_number"] != len(self.events):
            self.wrong = f"event {event['sequence_number']} instead of {len(self.events)}"
        self.events.append(event)
        return not self.wrong
