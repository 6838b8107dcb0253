"""Offload of large bodies to a thread, one at a time; small ones are processed at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from broker.server import offload as aside_module
from broker.server.offload import LARGE_BODY_BYTES, BodyOffload
from protocol.conversation import unpack
from protocol.errors import Code, RequestError
from tests.broker.application import House

WAIT_S = 10.0


@pytest.fixture
def offload() -> Iterator[BodyOffload]:
    made = BodyOffload()
    yield made
    made.close()


async def test_only_what_is_large_leaves_the_loops_thread_which_runs_meanwhile(offload: BodyOffload) -> None:
    assert await offload.work(LARGE_BODY_BYTES - 1, threading.get_ident) == threading.get_ident()
    reached = threading.Event()
    asyncio.get_running_loop().call_soon(reached.set)
    assert await offload.work(LARGE_BODY_BYTES, lambda: reached.wait(WAIT_S))


async def test_cancelled_waiting_work_is_not_run(offload: BodyOffload) -> None:
    held: Future[None] = Future()
    done: list[str] = []
    first = asyncio.ensure_future(offload.work(LARGE_BODY_BYTES, lambda: held.result(WAIT_S)))
    second = asyncio.ensure_future(offload.work(LARGE_BODY_BYTES, lambda: done.append("second")))
    third = asyncio.ensure_future(offload.work(LARGE_BODY_BYTES, lambda: done.append("third")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    held.set_result(None)
    await asyncio.gather(first, third)
    assert done == ["third"]


async def test_work_that_hangs_and_who_waits_behind_it_are_given_up(
    offload: BodyOffload, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aside_module, "WORK_S_MAX", 0.05)
    held: Future[None] = Future()
    done: list[str] = []
    works = [lambda: held.result(WAIT_S), lambda: done.append("behind")]
    asked = [offload.work(LARGE_BODY_BYTES, work) for work in works]
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, RequestError)
        assert error.code is Code.TEXT_GENERATION_BUSY
    held.set_result(None)
    monkeypatch.undo()
    assert await offload.work(LARGE_BODY_BYTES, lambda: "the next one") == "the next one"
    assert done == []
    assert len(caplog.messages) == 2


async def test_a_large_conversation_arrives_as_a_small_one_does(house: House) -> None:
    said = "x" * LARGE_BODY_BYTES
    answer = await house.serve(house.chat(said), "read")
    assert unpack(house.requests()[0]).messages == [{"role": "user", "content": said}]
    assert answer.json["choices"][0]["message"]["content"] == "read"
    wrong = await house.chat([{"type": "text", "text": said}, {"type": "input_audio"}]).refusal()
    assert wrong == (400, "unsupported_media", "messages[0].content[1]")
