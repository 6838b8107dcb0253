"""Fast path of a running stream: the same bytes in the same order, without waking its task."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from broker.requests.answer_response import RenderingError
from broker.server import fast_path
from broker.server.fast_path import EXTENSION, FastPath
from tests.broker.application import House, house_with_worker
from tests.broker.asgi import Exchange
from tests.factories import events, finished

PATHS = ("chat", "text", "respond", "message")
_NOT_ALIKE = re.compile(
    rb"(chatcmpl-|cmpl-|resp_|msg_|req_|call_)[0-9a-f]+|\"(created|created_at|completed_at)\":\d+"
)


@dataclass
class Cycle:
    """Part of uvicorn's cycle that the fast path uses. Its writes are appended to the exchange."""

    exchange: list[Exchange] = field(default_factory=list)
    flow: Any = field(default_factory=lambda: SimpleNamespace(write_paused=False))
    disconnected: bool = False
    chunked_encoding: bool | None = True
    response_complete: bool = False
    scope: dict[str, Any] = field(default_factory=lambda: {"method": "POST"})
    written: list[bytes] = field(default_factory=list)

    @property
    def transport(self) -> Any:
        return SimpleNamespace(write=self._write)

    def _write(self, chunk: bytes) -> None:
        size, _, rest = chunk.partition(b"\r\n")
        body = rest.removesuffix(b"\r\n")
        assert len(body) == int(size, 16) > 0, "an empty chunk would end the body"
        self.written.append(body)
        for exchange in self.exchange:
            exchange.sent.append({"type": "http.response.body", "body": body, "more_body": True})

    @property
    def way(self) -> FastPath:
        return FastPath(cast(RequestResponseCycle, self))


@pytest.fixture
def house() -> Iterator[House]:
    opened = house_with_worker()
    yield opened
    opened.close()
    assert len(opened.line.dispatcher.flights) == 0


def ask(house: House, cycle: Cycle | None, how: str = "chat", **fields: Any) -> Exchange:
    """Start a stream over a connection with a fast path; `cycle=None` is one without."""
    app = house.app

    async def short(scope: Scope, receive: Receive, send: Send) -> None:
        if cycle is not None:
            scope["extensions"] = {EXTENSION: {"way": cycle.way}}
        await app(scope, receive, send)

    house.app = short
    try:
        exchange: Exchange = getattr(house, how)(stream=True, **fields)
    finally:
        house.app = app
    if cycle is not None:
        cycle.exchange.append(exchange)
    return exchange


async def begin(house: House, answer: Exchange, number: int = 1) -> str:
    """Wait until the stream has begun and its task is idle."""
    id = await house.arrived(number)
    house.begin(id, "first")
    await answer.holds(b"first")
    for _ in range(5):
        await asyncio.sleep(0)
    return id


@pytest.mark.parametrize("how", PATHS)
async def test_the_short_way_says_what_the_long_one_says(how: str, house: House) -> None:
    bodies = []
    for number, cycle in enumerate((None, Cycle()), 1):
        answer = ask(house, cycle, how)
        id = await begin(house, answer, number)
        for sequence, text in enumerate((" and", "", ' "quoted"', " 駅🚂", "\n"), 1):
            house.line.say("w", events("w", id, text, first=sequence))
            for _ in range(3):
                await asyncio.sleep(0)
        house.line.say("w", finished("w", id))
        await answer.end()
        assert answer.complete
        bodies.append(_NOT_ALIKE.sub(b"-", answer.body))
        if cycle is not None:
            assert len(cycle.written) == 4
    assert bodies[0] == bodies[1]


async def test_deltas_of_one_event_loop_iteration_are_written_together(house: House) -> None:
    cycle = Cycle()
    answer = ask(house, cycle)
    id = await begin(house, answer)
    for sequence in range(1, 5):
        house.line.say("w", events("w", id, f"<{sequence}>", first=sequence))
    await answer.holds(b"<4>")
    assert len(cycle.written) == 1
    house.line.say("w", finished("w", id))
    await answer.end()


async def test_slow_client_falls_back_to_flow_control(house: House) -> None:
    cycle = Cycle()
    answer = ask(house, cycle)
    id = await begin(house, answer)
    cycle.flow.write_paused = True
    answer.stop_reading()
    for sequence in range(1, 9):
        house.line.say("w", events("w", id, f"<{sequence}>", first=sequence))
        await asyncio.sleep(0)
    cycle.flow.write_paused = False
    answer.read_on()
    await answer.holds(b"<8>")
    house.line.say("w", events("w", id, "<9>", first=9))
    await answer.holds(b"<9>")
    house.line.say("w", finished("w", id))
    await answer.end()
    assert re.findall(rb"<(\d)>", answer.body) == [b"%d" % number for number in range(1, 10)]
    assert len(cycle.written) == 1


async def test_a_fault_of_rendering_ends_the_request_and_not_the_stream_of_others(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*of: object) -> bytes:
        raise ZeroDivisionError

    other = ask(house, Cycle())
    others = await begin(house, other)
    answer = ask(house, Cycle())
    id = await begin(house, answer, 2)
    with monkeypatch.context() as patched:
        patched.setattr("broker.api.chat.chat.ChatChoiceRenderer.gain", broken)
        house.line.say("w", events("w", id, "x", first=1))
        with pytest.raises(RenderingError):
            await answer.end()
    assert house.cancels() == [id]
    assert "ZeroDivisionError" in caplog.text
    house.line.say("w", events("w", others, "goes on", first=1), finished("w", others))
    assert b"goes on" in (await other.end()).body


async def test_comments_come_where_nothing_was_said_for_so_long() -> None:
    house = house_with_worker(keepalive_s=0.05)
    cycle = Cycle()
    answer = ask(house, cycle)
    id = await begin(house, answer)
    said, gaps = time.monotonic(), []
    for sequence in range(1, 41):
        house.line.say("w", events("w", id, "x", first=sequence))
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - said)
        said += gaps[-1]
    assert sum(gaps) > 0.05
    assert b"keep-alive" not in answer.body or max(gaps) > 0.04, "a keep-alive beside tokens"
    await answer.holds(b": keep-alive\n\n: keep-alive\n\n")
    house.line.say("w", events("w", id, "last", first=41))
    await answer.holds(b"last")
    house.line.say("w", finished("w", id))
    await answer.end()
    assert cycle.written[-1].count(b"last") == 1


async def test_response_cancelled_by_another_request_ends_its_stream(house: House) -> None:
    answer = ask(house, Cycle(), "respond")
    await begin(house, answer)
    [id] = re.findall(rb'"(resp_\w+)"', answer.body)[:1]
    await house.post(f"/v1/responses/{id.decode()}/cancel").end()
    await answer.end()
    assert answer.complete
    assert b"event: response.incomplete" in answer.body


def test_the_short_cut_is_closed_where_a_chunk_has_no_place() -> None:
    assert Cycle().way.is_open
    assert not Cycle(flow=SimpleNamespace(write_paused=True)).way.is_open
    for closed in ({"disconnected": True}, {"chunked_encoding": None}, {"response_complete": True}):
        assert not Cycle(**closed).way.is_open
    for method, offered in (("POST", True), ("HEAD", False)):  # the answer has a body or none
        cycle = Cycle(scope={"method": method})
        fast_path.offer(cast(RequestResponseCycle, cycle))
        assert (fast_path.find(cycle.scope) is not None) == offered
