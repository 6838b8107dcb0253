"""Clients that retry with their idempotency key until they have a whole answer, in each dialect."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from tests.system import NO_TLS, sse_documents

DIALECTS = ("chat", "responses", "messages")
RETRY_S = 0.05
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body_of(dialect: str, prompt: str, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    if dialect == "responses":
        return {"model": "fake", "input": prompt, "stream": stream}
    limit = {"max_tokens": 4096} if dialect == "messages" else {}
    return {"model": "fake", "messages": messages, "stream": stream, **limit}


class RetryingClient(threading.Thread):
    """A client that sends one request, again and again until its answer is complete.

    `attempts`: connections that got anything. `pauses`: seconds from the loss of a connection to the first
    byte of the next response.
    """

    def __init__(
        self,
        url: str,
        dialect: str,
        prompt: str,
        key: str,
        *,
        stream: bool,
        within_s: float = 120,
        **fields: object,
    ) -> None:
        """`fields`: further fields of the body."""
        super().__init__()
        self.dialect, self.stream, self.prompt = dialect, stream, prompt
        self._url, self._key, self._within_s = url + PATHS[dialect], key, within_s
        self._body = body_of(dialect, prompt, stream=stream) | fields
        self._over = threading.Event()
        self.read = bytearray()
        self.beginnings: list[bytes] = []
        """What the earlier connections got."""
        self.pauses: list[float] = []
        self.refusals = 0
        """Responses with the status 503."""
        self.wrong = ""
        self.text: str | None = None

    def run(self) -> None:
        deadline, lost_at = time.monotonic() + self._within_s, None
        while self.text is None and not self.wrong:
            if time.monotonic() > deadline:
                self.wrong = f"no answer within {self._within_s} s"
                return
            try:
                lost_at = self._try(lost_at)
            except httpx.HTTPError:
                lost_at = lost_at or time.monotonic()
                self._over.wait(RETRY_S)

    def _try(self, lost_at: float | None) -> float | None:
        """Send the request once; return since when the client has no answer."""
        if self.read:
            self.beginnings.append(bytes(self.read))
        self.read = bytearray()
        headers = {"idempotency-key": self._key}
        with httpx.stream(
            "POST", self._url, json=self._body, headers=headers, timeout=30, verify=NO_TLS
        ) as answer:
            for chunk in answer.iter_raw():
                if lost_at is not None and answer.status_code == 200:
                    self.pauses.append(time.monotonic() - lost_at)
                    lost_at = None
                self.read += chunk
        if answer.status_code == 200:
            self.text = self._text()
        elif answer.status_code == 503:
            self.refusals += 1
        else:
            self.wrong = f"{answer.status_code}: {bytes(self.read[:300])!r}"
        self._over.wait(RETRY_S if self.text is None else 0)
        return lost_at

    def _text(self) -> str | None:
        """Return the text of the answer; None if it was cut off."""
        if not self.stream:
            return _whole_text(self.dialect, json.loads(self.read))
        documents = list(sse_documents(iter(self.read.decode().split("\n"))))
        if self.dialect == "chat":
            if documents[-1:] != ["[DONE]"]:
                return None
            deltas = [json.loads(each) for each in documents[:-1]]
            if "error" in deltas[-1]:
                self._fail(deltas[-1])
                return None
            return "".join(c["delta"].get("content") or "" for d in deltas for c in d["choices"])
        events = [json.loads(each) for each in documents]
        kinds = [event["type"] for event in events]
        if "error" in kinds or "response.failed" in kinds:
            self._fail(events[-1])
            return None
        if not kinds or kinds[-1] not in ("response.completed", "message_stop"):
            return None
        if self.dialect == "responses":
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
