"""Recorded requests of agents: what each sent while it did its ten steps, cleaned, one file for each.

Cleaned are: paths of the machine; identifiers (numbered in order of appearance, with their prefix and
length); dates and times (likewise, so that a time that changes between requests still does); the agents' own
prose, of which each line of more than `WORDS_MAX` words is replaced by its digest, so that equal lines stay
equal. Names, types and order of everything, the tools' schemas and what the steps themselves say are as
sent. `tests.e2e` replays them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent / "recordings"
WORDS_MAX = 6
PROSE = ("content", "description", "instructions", "output", "system", "text")
"""Keys whose texts are prose."""
UNSAID = re.compile(
    r"accept|authorization$|connection$|content-(length|type)$|cookie|host$|priority$|sec-|x-stainless-|x-api-key"
)
"""Headers that are not recorded: of the connection, of the SDK, and keys."""
THREADS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Headers that name a thread of an agent, the most specific one first."""

_TASK = re.compile(r"Do (ten steps|one step) in ")
_TOOLS = re.compile(rb'"tools":\s*\[\s*\{')
_DAY = r"20\d\d-\d\d-\d\d|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? [A-Z][a-z]+ \d+,? 20\d\d"
_TIME = rf"(?:{_DAY})(?:[T ]\d\d:\d\d:\d\d[\d.]*Z?)?"
_SINCE_1970 = r"\b1[78]\d{8}(?:\d{3})?\b"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RANDOM = re.compile(
    rf"(?P<time>{_TIME})|(?P<uuid>{_UUID})|(?P<seconds>{_SINCE_1970})"
    r"|\b(?P<prefix>(?:[a-z]+_)*)(?P<id>(?=[A-Za-z]*\d)[0-9A-Za-z]{16,})\b"
)


class Request(msgspec.Struct, frozen=True):
    """A request. `conversation`: names the thread, by its header or else by its task; empty if it has no
    tools, as that for a title."""

    conversation: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Recording(msgspec.Struct, frozen=True):
    """The requests of an agent, those of each conversation in order."""

    agent: str
    version: str
    requests: list[Request]

    def conversations(self) -> list[list[Request]]:
        """Return the requests of each conversation."""
        names = dict.fromkeys(request.conversation for request in self.requests if request.conversation)
        return [[request for request in self.requests if request.conversation == name] for name in names]


def record(
    agent: str, version: str, sent: Sequence[bytes | bytearray], paths: Mapping[str, str]
) -> Recording:
    """Return the cleaned recording of what was sent on each connection. `paths`: what stands for those of
    this machine."""
    cleaner = Cleaner(paths)
    found = [request for connection in sent for request in _requests(bytes(connection))]
    found.sort(key=lambda request: len(request.body.get("messages") or request.body.get("input") or ()))
    return Recording(agent, version, [cleaner.request(request) for request in found])


def save(recording: Recording, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(msgspec.json.encode(recording), preset=9))


def load(name: str) -> Recording:
    return msgspec.json.decode(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()), type=Recording)


def names() -> list[str]:
    """Return the names of the recordings."""
    return sorted(path.name.partition(".")[0] for path in FOLDER.iterdir())


def _requests(sent: bytes) -> Iterator[Request]:
    """Yield the requests with a JSON body, which have a length."""
    while sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        body, sent = rest[:size], rest[size:]
        if body:
            _, path, _ = first.split(" ")
            said = {name: value for name, value in headers.items() if not UNSAID.match(name)}
            yield Request(_conversation(headers, body), path, said, json.loads(body))


def _conversation(headers: Mapping[str, str], body: bytes) -> str:
    found = _TASK.search(body.decode())
    if found is None or not _TOOLS.search(body):
        return ""
    return next((headers[name] for name in THREADS if name in headers), found[1])


class Cleaner:
    """Replaces what differs between machines and runs, and prose, in requests."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._numbers: dict[str, int] = {}

    def request(self, request: Request) -> Request:
        headers = {name: self.text(value) for name, value in request.headers.items()}
        conversation, body = self.text(request.conversation), self._value(request.body)
        return Request(conversation, request.path, headers, body)

    def _value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {self.text(name): self._value(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self._value(each, key) for each in value]
        if not isinstance(value, str):
            return value
        text = self.text(value)
        return "\n".join(map(_shortened, text.split("\n"))) if key in PROSE else text

    def text(self, text: str) -> str:
        for path, instead in self._paths.items():
            text = text.replace(path, instead)
        return _RANDOM.sub(self._numbered, text)

    def _numbered(self, found: re.Match[str]) -> str:
        number = self._numbers.setdefault(found[0], len(self._numbers))
        if found["time"]:
            return f"2026-01-05T00:{number // 60 % 60:02}:{number % 60:02}Z"
        if found["seconds"]:
            return f"17{number:0{len(found[0]) - 2}}"
        if found["uuid"]:
            return f"00000000-0000-4000-8000-{number:012}"
        return f"{found['prefix']}{number:0{len(found['id'])}}"


def _shortened(line: str) -> str:
    if len(line.split()) <= WORDS_MAX:
        return line
    return f"[{hashlib.sha256(line.encode()).hexdigest()[:8]}]"
