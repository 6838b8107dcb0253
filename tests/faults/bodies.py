"""Malformed requests for a real gateway, over real sockets: `python -m tests.faults.bodies --count 100000`.

Every answer must be 2xx, 4xx or 503, and a failure an error object. Nothing may hang, no process may die or
grow, and another client's streams must be undisturbed. Request number N of a seed is always the same:
`--seed S --first N --count 1` sends only that one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import Code
from tests.faults.health import Health, Neighbour
from tests.faults.malformed import Request, draw
from tests.faults.runner import run_program
from tests.system import System, running_system, sse_documents

AT_ONCE = 64
HANG_S = 60.0
VANISH = 0.02
GATEWAY_FLAGS = ("--body-timeout", "3", "--max-waiting", "2048")
WORKER_FLAGS = ("--name", "fake", "--max-running", "64", "--images", "--videos")
LAST_EVENTS = {"message_stop", "error", "response.completed", "response.incomplete"}
RELATED = {
    "logprobs": {"top_logprobs"},
    "tools": {"tool_choice"},
    "n": {"best_of", "prompt"},
    "prompt": {"n"},
    "input": {"previous_response_id"},
    "previous_response_id": {"input"},
    "echo": {"max_tokens", "suffix"},
    "messages": {"prompt"},
}
"""Parameters that an error may name instead of the changed field."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


@dataclass(slots=True)
class Outcome:
    """The results of a run. `wrong`: failures, with the numbers of their requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    beside: int = 0


async def read_answer(reader: asyncio.StreamReader, *, bare: bool) -> Answer | None:
    """Read the next response; None at the end of the connection. `bare`: it has no body, as for HEAD."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in filter(None, lines[1:]):
            name, value = line.split(": ", 1)
            headers[name.lower()] = value
        status = int(lines[0].split()[1])
        if status == 100:
            return await read_answer(reader, bare=bare)
        body = b"" if bare else await _read_body(reader, headers)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ValueError(f"a truncated response: {error.partial[-100:]!r}") from error
        return None
    return Answer(status, headers, body)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    if headers.get("transfer-encoding") != "chunked":
        return await reader.read()
    found = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return found


async def ask(port: int, request: Request, *, vanish: bool) -> list[Answer]:
    """Return all responses to a request. Raises `TimeoutError`, or `ValueError` for a truncated one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    sender = asyncio.create_task(_send(writer, request.pieces))
    answers: list[Answer] = []
    try:
        async with asyncio.timeout(HANG_S):
            if vanish:
                await sender
                return answers
            while len(answers) < (request.answers or 1):
                answer = await read_answer(reader, bare=request.is_head)
                if answer is None:
                    break
                answers.append(answer)
    except ConnectionError:  # the server refused and closed before everything was sent
        pass
    finally:
        sender.cancel()
        writer.close()
    return answers


async def _send(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass


def judge(request: Request, answers: list[Answer]) -> str:
    """Return what is wrong with these responses, or an empty string."""
    over = bool(answers) and answers[-1].closes
    if request.answers is not None and len(answers) < request.answers and not over:
        return f"{len(answers)} of {request.answers} answers"
    for answer in answers:
        if not (200 <= answer.status < 300 or 400 <= answer.status < 500 or answer.status == 503):
            return f"status {answer.status}: {answer.body[:300]!r}"
        if "x-request-id" not in answer.headers:
            return "no request id"
        if answer.status == 503 and "retry-after" not in answer.headers:
            return "503 without Retry-After"
        if wrong := _judge_body(request, answer):
            return f"status {answer.status}, {wrong}"
    return ""


def _judge_body(request: Request, answer: Answer) -> str:
    if request.is_head:
        return ""
    if answer.is_stream:
        *events, last = sse_documents(iter(answer.body.decode().split("\n")))
        ended = last == "[DONE]" or json.loads(last).get("type") in LAST_EVENTS
        return "" if ended and all(json.loads(event) for event in events) else "truncated stream"
    document = json.loads(answer.body)
    if answer.status < 300:
        return "an error object" if document.get("error") else ""
    error = document["error"]
    if document.get("type") == "error":
        return _judge_anthropics(request, answer, document)
    if error.keys() < {"message", "type", "param", "code"} or not error["message"]:
        return f"an incomplete error object: {error}"
    if error["code"] not in set(Code):
        return f"an unknown code: {error}"
    root = (error["param"] or "").split(".")[0].split("[")[0]
    expected = {request.changed} | RELATED.get(request.changed or "", set())
    not_json = "not valid JSON" in error["message"]
    if request.changed is not None and answer.status == 400 and root not in expected and not not_json:
        return f"{request.changed} was changed, and {error} names something else"
    return ""


def _judge_anthropics(request: Request, answer: Answer, document: Any) -> str:
    """Check an error in Anthropic's envelope, whose message must name the wrong parameter."""
    error = document["error"]
    if document.keys() != {"type", "error", "request_id"} or error.keys() != {"type", "message"}:
        return f"not an error envelope: {document}"
    expected = {request.changed or ""} | RELATED.get(request.changed or "", set())
    words = set(re.findall(r"\w+", error["message"]))
    named = not expected.isdisjoint(words) or "not valid JSON" in error["message"]
    if request.changed is not None and answer.status == 400 and not named:
        return f"{request.changed} was changed, and {error} names something else"
    return ""


class Run:
    """A run of requests drawn from a seed, `AT_ONCE` at a time."""

    def __init__(self, port: int, seed: int, first: int, count: int, health: Health) -> None:
        self._port, self._seed, self._health = port, seed, health
        self._numbers = iter(range(first, first + count))
        self._warm_at = first + count // 10
        self.outcome = Outcome()

    async def run(self) -> None:
        await asyncio.gather(*(self._ask_on() for _ in range(AT_ONCE)))

    async def _ask_on(self) -> None:
        for number in self._numbers:
            if number == self._warm_at:
                self._health.warm()
            await self._ask(number)

    async def _ask(self, number: int) -> None:
        dice = random.Random(f"{self._seed}/{number}")
        request, vanish = draw(dice), dice.random() < VANISH
        answers: list[Answer] = []
        try:
            answers = await ask(self._port, request, vanish=vanish)
            wrong = "" if vanish else judge(request, answers)
        except Exception as error:
            wrong = repr(error)
        if wrong:
            self.outcome.wrong.append(f"{number} ({', '.join(request.kinds)}): {wrong}")
        said = [str(answer.status) for answer in answers] or ["vanished" if vanish else "closed"]
        self.outcome.statuses.update(said)


def run(system: System, seed: int, count: int, first: int = 0) -> Outcome:
    """Send `count` requests to a system that serves the model `fake`."""
    health = Health([system.gateway, *system.workers])
    fuzz = Run(system.port, seed, first, count, health)
    with Neighbour(system.url, "fake") as neighbour:
        asyncio.run(fuzz.run())
    outcome = fuzz.outcome
    outcome.beside = neighbour.streams
    outcome.wrong += [neighbour.wrong] if neighbour.wrong else []
    outcome.wrong += health.complaints()
    return outcome


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the requests in a new system."""
    with running_system(folder, GATEWAY_FLAGS) as system:
        system.start_ready_worker(*WORKER_FLAGS)
        outcome = run(system, given.seed, given.count, given.first)
    print(f"{given.count} requests, {outcome.beside} undisturbed streams")
    print(", ".join(f"{times} {status}" for status, times in outcome.statuses.most_common()))
    return outcome.wrong


if __name__ == "__main__":
    run_program(__doc__, check, {"--count": 100_000, "--seed": 0, "--first": 0})
