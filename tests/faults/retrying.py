"""Clients that retry with their idempotency key until they have a whole answer, in each dialect."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import httpx

from tests.dialects import PATHS, body_of
from tests.faults.streams import joined_text
from tests.system import NO_TLS, sse_documents

RETRY_S, WITHIN_S = 0.05, 120.0


class RetryingClient(threading.Thread):
    """A client that sends one request, again and again until its answer is complete."""

    def __init__(self, url: str, dialect: str, prompt: str, key: str, *, stream: bool) -> None:
        super().__init__()
        self._dialect, self._stream = dialect, stream
        self._url, self._key = url + PATHS[dialect], key
        self._body = body_of(dialect, prompt, model="fake", stream=stream)
        self._over = threading.Event()
        self.read = bytearray()
        self.beginnings: list[bytes] = []
        """What the earlier connections got."""
        self.refusals = 0
        """Responses with the status 503."""
        self.wrong = ""
        self.text: str | None = None

    def run(self) -> None:
        deadline = time.monotonic() + WITHIN_S
        while self.text is None and not self.wrong:
            if time.monotonic() > deadline:
                self.wrong = f"no answer within {WITHIN_S} s"
                return
            with contextlib.suppress(httpx.HTTPError):
                self._try()
            self._over.wait(RETRY_S if self.text is None else 0)

    def _try(self) -> None:
        """Send the request once."""
        if self.read:
            self.beginnings.append(bytes(self.read))
        self.read = bytearray()
        headers = {"idempotency-key": self._key}
        with httpx.stream(
            "POST", self._url, json=self._body, headers=headers, timeout=30, verify=NO_TLS
        ) as answer:
            for chunk in answer.iter_raw():
                self.read += chunk
        if answer.status_code == 200:
            self.text = self._text()
        elif answer.status_code == 503:
            self.refusals += 1
        else:
            self.wrong = f"{answer.status_code}: {bytes(self.read[:300])!r}"

    def _text(self) -> str | None:
        """Return the text of the answer; None if it was cut off."""
        if not self._stream:
            return _whole_text(self._dialect, json.loads(self.read))
        documents = list(sse_documents(iter(self.read.decode().split("\n"))))
        if self._dialect == "chat":
            if documents[-1:] != ["[DONE]"]:
                return None
            if "error" in (last := json.loads(documents[-2])):
                self._fail(last)
                return None
            return joined_text(self.read.decode())
        events = [json.loads(each) for each in documents]
        kinds = [event["type"] for event in events]
        if "error" in kinds or "response.failed" in kinds:
            self._fail(events[-1])
            return None
        if not kinds or kinds[-1] not in ("response.completed", "message_stop"):
            return None
        if self._dialect == "responses":
            return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")

    def _fail(self, document: dict[str, Any]) -> None:
        """An error that a retry may mend is no failure of the test; the last one shows."""
        code = json.dumps(document)
        if "shutting_down" not in code and "worker_unavailable" not in code:
            self.wrong = code[:300]


def _whole_text(dialect: str, document: dict[str, Any]) -> str:
    if dialect == "chat":
        return str(document["choices"][0]["message"]["content"])
    if dialect == "responses":
        return str(document["output"][0]["content"][0]["text"])
    return str(document["content"][0]["text"])
