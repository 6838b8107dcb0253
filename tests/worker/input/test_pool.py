"""Templates and tokenization beside the I/O thread: one tokenizer per thread, one outcome per request."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from protocol.errors import Code, RequestError
from protocol.messages import Generate
from tests.factories import engine_request, request
from tests.system import eventually
from worker.input.pool import PREPARE_S_MAX, SHORT_COST_MAX, THREADS, Outcome, PreparerPool
from worker.interfaces import Preparer
from worker.values import NEVER, CancelToken, EngineRequest, Tokenized

WAIT_S = 20.0


class Scripted:
    """A preparer that records its callers and does what the prompt says."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        self.threads.add(threading.get_ident())
        if request.prompt == "break":
            raise ZeroDivisionError("secret detail")
        return engine_request(request.id)

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        raise NotImplementedError


class Paused(Scripted):
    """Holds each request whose prompt begins with "pause" until all may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.goes_on = threading.Semaphore(0), threading.Event()

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        if (request.prompt or "").startswith("pause"):
            self.began.release()
            deadline = time.monotonic() + WAIT_S
            while not self.goes_on.wait(0.005):
                assert time.monotonic() < deadline
                cancel_token.check()
        return super().prepare(request, media, cancel_token)

    def wait_for(self, count: int) -> None:
        """Wait until this many more requests have begun."""
        for _ in range(count):
            assert self.began.acquire(timeout=WAIT_S)


class Desk:
    """A pool, and the outcome of each request."""

    def __init__(self, open_preparer: Callable[[], Preparer]) -> None:
        self.pool = PreparerPool(open_preparer)
        self.outcomes: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()

    def prepare(self, id: str, prompt: str = "") -> None:
        asked = request(id, prompt=prompt)
        self.pool.prepare(asked, [], lambda id, outcome: self.outcomes.put((id, outcome)))

    def next(self) -> tuple[str, Outcome]:
        return self.outcomes.get(timeout=WAIT_S)


Open = Callable[[Callable[[], Preparer]], Desk]


@pytest.fixture
def open_desk() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_one(open_preparer: Callable[[], Preparer]) -> Desk:
            desk = Desk(open_preparer)
            stack.callback(desk.pool.close)
            return desk

        yield open_one


def test_every_thread_has_a_preparer_of_its_own_and_keeps_it(open_desk: Open) -> None:
    opened: list[Scripted] = []
    together = threading.Barrier(THREADS)

    class Meeting(Scripted):
        def prepare(
            self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
        ) -> EngineRequest:
            if request.prompt == "meet":
                together.wait(WAIT_S)
            return super().prepare(request, media, cancel_token)

    def open_preparer() -> Preparer:
        opened.append(Meeting())
        return opened[-1]

    desk = open_desk(open_preparer)
    # Requests that wait for each other must be on different threads.
    for n in range(THREADS):
        desk.prepare(f"first-{n}", "meet")
    for n in range(50):
        desk.prepare(f"later-{n}")
    ids = {desk.next()[0] for _ in range(THREADS + 50)}
    assert len(ids) == THREADS + 50
    assert len(opened) == THREADS
    assert [len(preparer.threads) for preparer in opened] == [1] * THREADS
    assert len(set.union(*(preparer.threads for preparer in opened))) == THREADS
    assert threading.get_ident() not in set.union(*(preparer.threads for preparer in opened))


def test_unexpected_error_fails_its_request_and_reveals_only_its_type(open_desk: Open) -> None:
    desk = open_desk(Scripted)
    desk.prepare("bad", "break")
    _, outcome = desk.next()
    assert isinstance(outcome, RequestError)
    assert outcome.code is Code.INTERNAL_ERROR
    assert "ZeroDivisionError" in outcome.message
    assert "secret" not in outcome.message
    desk.prepare("good")
    assert desk.next() == ("good", engine_request("good"))


def test_a_preparer_that_cannot_be_opened_fails_its_request_and_is_tried_again(open_desk: Open) -> None:
    failures = [OSError("no tokenizer")] * (THREADS + 3)

    def open_preparer() -> Preparer:
        if failures:
            raise failures.pop()
        return Scripted()

    desk = open_desk(open_preparer)
    desk.pool.warm()  # fails without a word: a request tells
    for n in range(3):
        desk.prepare(f"r{n}")
        outcome = desk.next()[1]
        assert isinstance(outcome, RequestError)
        assert outcome.code is Code.INTERNAL_ERROR
    desk.prepare("good")
    assert desk.next() == ("good", engine_request("good"))


def test_a_pool_that_closes_begins_nothing_more_and_waits_for_nobody(open_desk: Open) -> None:
    preparer = Paused()
    desk = open_desk(lambda: preparer)
    for n in range(THREADS + 3):
        desk.prepare(f"r{n}", "pause")
    preparer.wait_for(THREADS)
    desk.pool.close()  # they would not go on before this returns
    eventually(lambda: not lanes_at_work(), within_s=WAIT_S, what="the requests at work are cancelled")
    assert desk.outcomes.empty()
    assert not preparer.began.acquire(blocking=False)


def lanes_at_work() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare")]


def test_pool_is_stuck_when_every_thread_is_at_work_on_one_request_for_too_long(open_desk: Open) -> None:
    preparer = Paused()
    desk = open_desk(lambda: preparer)
    late = time.monotonic() + PREPARE_S_MAX + WAIT_S
    assert not desk.pool.is_stuck(late)
    for number in range(THREADS):
        desk.prepare(f"r{number}", "pause")
    preparer.wait_for(THREADS)
    assert not desk.pool.is_stuck(time.monotonic())
    assert desk.pool.is_stuck(late)
    preparer.goes_on.set()
    for _ in range(THREADS):
        desk.next()
    eventually(lambda: not desk.pool.is_stuck(late), within_s=WAIT_S, what="the threads are free")


LONG = "pause" + " " * SHORT_COST_MAX


def test_short_request_does_not_wait_behind_long_ones(open_desk: Open) -> None:
    preparer = Paused()
    desk = open_desk(lambda: preparer)
    for number in range(5):
        desk.prepare(f"long-{number}", LONG)
    preparer.wait_for(1)
    for number in range(20):
        desk.prepare(f"short-{number}")
        assert desk.next()[0] == f"short-{number}"
    assert desk.pool.status().running == 1
    assert desk.pool.status().waiting == 4
    preparer.goes_on.set()
    assert {desk.next()[0] for _ in range(5)} == {f"long-{number}" for number in range(5)}


def test_cancelled_request_leaves_the_queue_and_its_thread(open_desk: Open) -> None:
    preparer = Paused()
    desk = open_desk(lambda: preparer)
    for number in range(3):
        desk.prepare(f"r{number}", LONG)
    preparer.wait_for(1)
    desk.pool.cancel("r2")
    assert desk.pool.status().waiting == 1
    desk.pool.cancel("r0")
    preparer.wait_for(1)  # the thread took the next one
    desk.pool.cancel("r1")
    eventually(lambda: desk.pool.status().running == 0, within_s=WAIT_S, what="the thread is free")
    status = desk.pool.status()
    assert (status.waiting, status.bytes, status.cancelled) == (0, 0, 3)
    desk.pool.cancel("r0")  # idempotent
    desk.prepare("good", " " * SHORT_COST_MAX)
    assert desk.next() == ("good", engine_request("good"))
    assert desk.outcomes.empty()
