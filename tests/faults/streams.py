"""Clients of the fault tests, each with one request in a thread, and the expected answers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.scripted_worker.engine import WORDS
from tests.scripted_worker.pictures import IMAGE_TOKENS
from tests.system import NO_TLS, chat_body, eventually, sse_documents

Call = tuple[str, str]
"""The name of a tool, and its arguments as JSON."""
ANSWER_S_MAX = 120.0
PAUSE_S_MIN = 0.1


class Client(threading.Thread):
    """A client that sends one request and reads the response, streamed or not, with low overhead."""

    def __init__(
        self,
        url: str,
        body: dict[str, object],
        path: str = "/v1/chat/completions",
        within_s: float = math.inf,
    ) -> None:
        """`within_s`: the time for the whole answer."""
        super().__init__()
        self._url, self._body, self._within_s = url + path, body, within_s
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.failure: Exception | None = None
        self.ended_at = 0.0
        self.read = bytearray()
        self.pauses: list[tuple[float, float]] = []
        """Begin and end of the intervals without data."""

    def run(self) -> None:
        deadline = time.monotonic() + self._within_s
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, timeout=ANSWER_S_MAX, verify=NO_TLS
            ) as answer:
                self.status, self.headers = answer.status_code, answer.headers
                last = time.monotonic()
                for piece in answer.iter_raw():
                    self.read += piece
                    now = time.monotonic()
                    assert now < deadline, f"no end within {self._within_s} s"
                    if piece.startswith(b":"):
                        continue  # a keep-alive comment
                    if now - last > PAUSE_S_MIN:
                        self.pauses.append((last, now))
                    last = now
        except Exception as error:
            self.failure = error
        self.ended_at = time.monotonic()

    @property
    def pause_s(self) -> float:
        """The longest pause."""
        return max((end - begin for begin, end in self.pauses), default=0.0)

    @property
    def flowing(self) -> bool:
        return self.read.count(b"data: ") > 3

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The document, or the events without `[DONE]`, which must be present."""
        assert self.failure is None, self.failure
        if not self._body.get("stream") or self.status != 200:
            return [json.loads(self.read)]
        *events, done = sse_documents(iter(self.read.decode().split("\n")))
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    @property
    def error(self) -> str | None:
        """The code of the error in the response."""
        error = self.documents[-1].get("error")
        return error and error["code"]

    @property
    def texts(self) -> list[str]:
        """The text of each choice; all must have finished."""
        return self._joined("content")

    @property
    def thoughts(self) -> list[str]:
        """The reasoning of each choice."""
        thoughts = self._joined("reasoning_content")
        assert self._joined("reasoning") == thoughts
        return thoughts

    @property
    def calls(self) -> list[list[Call]]:
        """The tool calls of each choice; all must have finished. Only a call's first delta names it."""
        assert self.error is None, self.read[-300:]
        calls: dict[int, dict[int, Call]] = {}
        ids: set[str] = set()
        for document in self.documents:
            for choice in document["choices"]:
                said = choice.get("delta") or choice.get("message") or {}
                known = calls.setdefault(choice["index"], {})
                for place, entry in enumerate(said.get("tool_calls") or []):
                    function, index = entry["function"], entry.get("index", place)
                    if index not in known:
                        assert entry["type"] == "function"
                        assert index == len(known)
                        assert entry["id"] not in ids
                        ids.add(entry["id"])
                        known[index] = (function["name"], "")
                    else:
                        assert not {"id", "type"} & entry.keys()
                        assert "name" not in function
                    name, before = known[index]
                    known[index] = (name, before + function["arguments"])
        return [list(calls[choice].values()) for choice in sorted(calls)]

    @property
    def reasons(self) -> list[str]:
        """The finish reason of each choice."""
        choices = [choice for document in self.documents for choice in document["choices"]]
        ends = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
        return [ends[index] for index in sorted(ends)]

    def _joined(self, channel: str) -> list[str]:
        assert self.error is None, self.read[-300:]
        texts: dict[int, str] = {}
        for document in self.documents:
            for choice in document["choices"]:
                said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                texts[choice["index"]] = texts.get(choice["index"], "") + (said.get(channel) or "")
        assert len(self.reasons) == len(texts)
        return [texts[index] for index in sorted(texts)]

    @property
    def completion_tokens(self) -> int:
        """The completion tokens in the response's usage."""
        return int(self.documents[-1]["usage"]["completion_tokens"])

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that were restored from the prefix cache."""
        return self._detail("prompt_tokens_details", "cached_tokens")

    @property
    def accepted_tokens(self) -> int:
        """The number of accepted draft tokens of a prediction."""
        return self._detail("completion_tokens_details", "accepted_prediction_tokens")

    def _detail(self, part: str, name: str) -> int:
        return int((self.documents[-1]["usage"].get(part) or {}).get(name) or 0)


def scripted(text: str, tokens: int, seed: int = 0, seen: Sequence[str] = (), thinks: int = 0) -> str:
    """Return the scripted engine's answer to a prompt, greedy or with a seed. `seen`: its words for each
    image, after `thinks` words of reasoning."""
    first = seed + 7 * (len(text.split()) + IMAGE_TOKENS * len(seen))
    words = [WORDS[(first + 7 * number) % len(WORDS)] for number in range(tokens)]
    words[thinks : thinks + len(seen)] = seen[: max(0, tokens - thinks)]
    return "".join(f"{word} " for word in words)


def joined_text(stream: str) -> str:
    """Return the text in the events of a streamed chat completion."""
    events = [json.loads(event) for event in sse_documents(iter(stream.split("\n"))) if event != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def ask(url: str, text: str, *, stream: bool = True, **fields: Any) -> Client:
    """Start a client."""
    if stream:
        fields |= {"stream_options": {"include_usage": True}}
    client = Client(url, chat_body(text, stream=stream, **fields))
    client.start()
    return client


def wait_for(clients: Sequence[Client], within_s: float) -> None:
    """Wait until all clients have their answers."""
    deadline = time.monotonic() + within_s
    for client in clients:
        client.join(max(0.0, deadline - time.monotonic()))
        assert not client.is_alive(), f"no answer within {within_s} s"


def wait_until_taken(url: str, clients: Sequence[Client]) -> None:
    """Wait until all requests are in flight or answered, so that none arrives too late and is refused."""

    def taken() -> bool:
        status = httpx.get(f"{url}/v1/status", timeout=ANSWER_S_MAX, verify=NO_TLS).json()
        return int(status["gateway"]["in_flight"]) + sum(bool(c.ended_at) for c in clients) >= len(clients)

    eventually(taken, within_s=60, what="all requests are taken")


def wait_until_flowing(clients: Sequence[Client]) -> None:
    """Wait until all clients have received a part of their answers."""
    eventually(lambda: all(client.flowing for client in clients), within_s=60, what="all streams flow")
