"""A worker process with a scripted gateway: handshake, requests and exit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from protocol import sockets, wire
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Adopt,
    CacheCleared,
    Cancel,
    ClearCache,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Message,
    PrefixHit,
    Ready,
    Rejected,
    StepOutputs,
    ToGateway,
    Welcome,
)
from protocol.settings import EXIT_CONFIGURATION
from protocol.types import AdoptedRow, Delta, Sampling, TokenizeOptions, Usage
from tests import factories
from tests.scripted_worker.engine import TOKEN_BYTES
from tests.scripted_worker.text import CONTEXT_LENGTH
from tests.system import Process, eventually
from worker.schedule.memory_reservations import BLOCK_TOKENS
from worker.transport.exit_codes import EXIT_DEVICE, EXIT_NO_ROOM

WAIT_S = 60.0

M = TypeVar("M", bound=Message)


class Gateway:
    """The gateway's end of the connection, driven by the test."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/line"
        self.incarnation = "gateway-1"
        self.orphan_s = 0.0
        self.worker = b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.open()

    def open(self) -> None:
        self._router = sockets.bind_router(self._context, self.endpoint, None)

    def close(self) -> None:
        if self._router.closed:
            return
        monitor = self._router.get_monitor_socket()
        self._router.disable_monitor()
        monitor.close(0)
        self._router.close(0)

    def end(self) -> None:
        self.close()
        self._context.term()

    def next(self) -> ToGateway:
        """Return the next message, and check its sender."""
        assert self._router.poll(int(1000 * WAIT_S)), "no message from the worker"
        self.worker, *frames = self._router.recv_multipart()
        message, _ = wire.decode_to_gateway(frames)
        assert message.incarnation == self.worker.decode()
        return message

    def until(self, kind: type[M], check: Callable[[M], object] = lambda message: True) -> M:
        """Return the next message of a kind, skipping others."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            message = self.next()
            if isinstance(message, kind) and check(message):
                return message
        raise AssertionError(f"no such {kind.__name__}")

    def during_beats(self, count: int) -> list[ToGateway]:
        """Return all messages until `count` heartbeats have arrived."""
        said: list[ToGateway] = []
        while sum(isinstance(message, Heartbeat) for message in said) < count:
            said.append(self.next())
        return said

    def send(self, message: Message) -> None:
        self.send_frames(*wire.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._router.send_multipart([self.worker, *frames])

    def welcome(self) -> None:
        self.send(Welcome(incarnation=self.incarnation, version=PROTOCOL_VERSION, orphan_s=self.orphan_s))

    def adopt(self, *rows: AdoptedRow) -> None:
        self.send(Adopt(incarnation=self.incarnation, rows=list(rows)))

    def die(self, successor: str) -> None:
        """Be replaced by another gateway, which hears of what happened only from the worker."""
        self.close()
        self.incarnation = successor
        self.open()

    def generate(
        self,
        id: str,
        prompt: str,
        *,
        logprobs: int | None = None,
        **fields: Any,
    ) -> None:
        sampling = Sampling(seed=1, logprobs=logprobs)
        self.send(
            factories.request(id, incarnation=self.incarnation, prompt=prompt, sampling=sampling, **fields)
        )

    def cancel(self, id: str) -> None:
        self.send(Cancel(incarnation=self.incarnation, id=id))

    def meet(self) -> Hello:
        """Shake hands with a new worker; return when it serves and its first reports have been received."""
        hello = self.until(Hello)
        self.welcome()
        self.until(Ready)
        # Reports made before the handshake may follow the initial state.
        self.during_beats(2)
        return hello


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path)
    yield gateway
    gateway.end()


Start = Callable[..., Process]


@pytest.fixture
def start(gateway: Gateway, tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start_worker(*flags: str) -> Process:
        # A worker that a test leaves running gets little time to exit.
        arguments = [
            "tests.scripted_worker",
            "--endpoint",
            gateway.endpoint,
            "--drain-timeout",
            "0.2",
            *flags,
        ]
        started.append(Process(f"worker-{len(started)}", arguments, tmp_path))
        return started[-1]

    yield start_worker
    for process in started:
        process.stop()


def test_a_worker_says_who_it_is_then_how_it_loads_then_that_it_is_ready(
    gateway: Gateway, start: Start
) -> None:
    flags = ("--name", "m", "--max-running", "3", "--load", "0.2")
    process = start(*flags, "--cache-limit-bytes", str(1000 * TOKEN_BYTES))
    hello = gateway.next()
    assert isinstance(hello, Hello)
    assert (hello.version, hello.model, hello.pid) == (PROTOCOL_VERSION, "m", process.pid)
    assert {"mlx-roundhouse", "mlx"} <= hello.versions.keys()
    gateway.welcome()
    said: list[ToGateway] = []
    while not said or not isinstance(said[-1], Ready):
        said.append(gateway.next())
    loading = [message.done for message in said if isinstance(message, Loading)]
    assert loading == sorted(loading)
    assert len(loading) > 3
    ready = said[-1]
    assert isinstance(ready, Ready)
    assert (ready.model, ready.running_max) == ("m", 3)
    assert ready.cache_bytes_max == 1000 * TOKEN_BYTES
    fits = 1000 // BLOCK_TOKENS * BLOCK_TOKENS - 1  # a row always has room to grow
    assert ready.tokens_max == ready.context_length == fits
    beat = gateway.until(Heartbeat)
    assert (beat.running, beat.waiting, beat.cache_bytes) == (0, 0, 0)


def test_a_worker_asked_who_it_is_says_so_once_for_each_time(gateway: Gateway, start: Start) -> None:
    start()
    hello = gateway.meet()
    for _ in range(2):
        # A gateway that does not know the worker asks with a Welcome, and answers the Hello with another.
        gateway.welcome()
        assert gateway.until(Hello) == hello
        gateway.welcome()
        said = gateway.during_beats(4)
        assert [m for m in said if isinstance(m, Hello)] == []
        assert len([m for m in said if isinstance(m, Ready)]) == 1


def test_a_request_is_accepted_answered_and_ended(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    gateway.generate("a", "three words here !tokens=5")
    said = []
    while not said or not isinstance(said[-1], Finished):
        message = gateway.next()
        if not isinstance(message, Heartbeat):
            said.append(message)
    assert isinstance(said[0], Accepted)
    assert said[0].prompt_tokens == 4
    deltas = [delta for message in said if isinstance(message, StepOutputs) for delta in message.deltas]
    assert [delta.sequence for delta in deltas] == list(range(6))
    end = said[-1]
    assert isinstance(end, Finished)
    assert (end.id, end.reason, end.usage.completion_tokens) == ("a", "stop", 6)


def test_a_prompt_that_is_only_counted_is_never_run(gateway: Gateway, start: Start) -> None:
    start("--max-running", "1")
    gateway.meet()
    gateway.generate("long", "!tokens=100000 !slow=20")
    gateway.until(Accepted)
    gateway.generate("a", "one two", tokenizing=TokenizeOptions(tokens=True, pieces=True))
    accepted = gateway.until(Accepted)
    assert (accepted.id, accepted.prompt_tokens) == ("a", 2)
    assert (accepted.tokens, accepted.pieces) == ([4, 4], ["one", "two"])
    end = gateway.until(Finished)
    assert (end.id, end.usage.prompt_tokens, end.usage.completion_tokens) == ("a", 2, 0)


def test_a_request_that_cannot_be_prepared_is_refused(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    gateway.generate("a", "!nonsense")
    refusal = gateway.until(Failed)
    assert (refusal.id, refusal.code, refusal.param) == ("a", "invalid_request", "messages")


def test_texts_are_refused_by_a_model_that_generates(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    gateway.send(factories.embed(["word"], incarnation=gateway.incarnation))
    refusal = gateway.until(Failed)
    assert (refusal.id, refusal.code, refusal.param) == ("a", "invalid_request", "model")
    assert "does not compute embeddings" in refusal.message
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"


def test_log_probabilities_come_with_the_tokens(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    gateway.generate("a", "!tokens=1", logprobs=2)
    first, last = [gateway.until(StepOutputs).deltas[0] for _ in range(2)]
    [likelihood] = first.likelihoods
    assert likelihood.bytes == first.text.encode()
    assert likelihood.logprob < 0
    assert [spelled for spelled, _ in likelihood.top] == [likelihood.bytes, b"rails "]
    assert last.likelihoods == []


def test_a_request_that_is_late_fails_and_leaves(gateway: Gateway, start: Start) -> None:
    start("--step-ms", "5")
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000", deadline_s=0.2)
    failure = gateway.until(Failed)
    assert (failure.id, failure.code) == ("a", "deadline_exceeded")
    gateway.until(Heartbeat, lambda beat: beat.running == 0)


def test_a_worker_keeps_to_the_bytes_it_is_given_for_caches(gateway: Gateway, start: Start) -> None:
    limit = 16 * 256
    start("--cache-limit-bytes", str(limit))
    gateway.meet()
    for words in (255, 300, 2 * CONTEXT_LENGTH):
        gateway.generate("long", "word " * words)
        failure = gateway.until(Failed)
        assert failure.code == "context_length_exceeded"
        assert "maximum context length is 255 tokens in the memory of this server" in failure.message
        assert f"resulted in {words} tokens" in failure.message
    gateway.generate("short", "word " * 254)
    assert gateway.until(Finished).usage == Usage(prompt_tokens=254, completion_tokens=1)
    # Two requests that do not fit together to their ends: one is preempted, and still completes.
    for id in ("a", "b"):
        gateway.generate(id, f"{id} !tokens=180")
    ends: dict[str, Finished] = {}
    beats: list[Heartbeat] = []
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while len(ends) < 2:
        message = gateway.next()
        if isinstance(message, StepOutputs):
            for delta in message.deltas:
                tokens[delta.id] += delta.tokens
        elif isinstance(message, Finished):
            ends[message.id] = message
        elif isinstance(message, Heartbeat):
            beats.append(message)
    assert {id: end.usage.completion_tokens for id, end in ends.items()} == {"a": 181, "b": 181}
    assert tokens["a"] == tokens["b"]
    assert all(beat.cache_bytes <= limit for beat in beats)


def test_prompts_that_fail_do_not_end_a_worker(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    for n in range(12):
        gateway.generate(f"r{n}", "word !oom")
        assert gateway.until(Failed).id == f"r{n}"
    gateway.generate("a", "word !tokens=1")
    assert gateway.until(Finished).id == "a"


def test_a_cancelled_request_leaves_and_is_not_mentioned_again(gateway: Gateway, start: Start) -> None:
    start("--step-ms", "5")
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    assert gateway.until(Heartbeat, lambda beat: beat.running == 1).steps > 0
    gateway.cancel("a")
    gateway.cancel("a")
    gateway.cancel("never was")
    gateway.until(Heartbeat, lambda beat: beat.running == 0)
    said = gateway.during_beats(2)
    assert all(isinstance(message, Heartbeat) for message in said)
    assert [m.cache_bytes for m in said if isinstance(m, Heartbeat)] == [0, 0]


def test_a_worker_tells_where_each_of_its_requests_stands(gateway: Gateway, start: Start) -> None:
    start("--step-ms", "5", "--max-running", "1")
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.generate("b", "later !tokens=1")
    beat = gateway.until(Heartbeat, lambda beat: len(beat.rows) == 2 and beat.rows[0].answered > 1)
    first, second = beat.rows
    assert (first.id, first.phase, first.prompt_tokens) == ("a", "decode", 4)
    assert first.first_token_s is not None
    assert 0 <= first.first_token_s <= first.seconds
    assert (second.id, second.phase, second.prompt_tokens) == ("b", "waiting", 2)
    assert (second.answered, second.first_token_s) == (0, None)
    gateway.cancel("a")
    gateway.until(Finished, lambda end: end.id == "b")
    assert gateway.until(Heartbeat, lambda beat: not beat.running + beat.waiting).rows == []


def test_a_worker_told_to_clear_its_cache_says_when_it_has(gateway: Gateway, start: Start) -> None:
    start("--step-ms", "5")
    gateway.meet()
    gateway.generate("a", "word !tokens=3")
    gateway.until(Finished)
    gateway.generate("b", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    gateway.send(ClearCache(incarnation=gateway.incarnation, id="c"))
    assert gateway.until(CacheCleared).id == "c"
    # Running requests continue.
    assert gateway.until(StepOutputs).deltas[0].id == "b"
    assert gateway.until(Heartbeat).running == 1


def test_garbage_is_dropped_and_what_follows_is_heard(gateway: Gateway, start: Start) -> None:
    process = start()
    gateway.meet()
    for garbage in ([b""], [b"\xc1"], [b"\x91" * 5000], [b"\xff" * 64, b"media"]):
        gateway.send_frames(*garbage)
    gateway.send_frames(*wire.encode(Heartbeat(incarnation="g", running=0, waiting=0, steps=0)))
    gateway.generate("a", "word !tokens=1")
    assert gateway.until(Finished).id == "a"
    assert process.log().count("dropped an invalid message") == 5


def test_a_request_that_comes_twice_is_answered_once(gateway: Gateway, start: Start) -> None:
    start()
    gateway.meet()
    gateway.generate("a", "word !tokens=3")
    gateway.generate("a", "word !tokens=3")
    assert gateway.until(Finished).usage.completion_tokens == 4
    gateway.generate("b", "word !tokens=1")
    said: list[Message] = []
    while not said or not isinstance(said[-1], Finished):
        said.append(gateway.next())
    assert not any(isinstance(message, Accepted | Finished) and message.id == "a" for message in said)


def test_a_request_that_comes_too_early_is_told_that_the_model_loads(gateway: Gateway, start: Start) -> None:
    process = start("--load", "600")
    gateway.until(Hello)
    gateway.welcome()
    gateway.generate("a", "word")
    assert gateway.until(Failed).code == "model_loading"
    # A load cannot be interrupted, but does not delay the exit.
    process.kill(signal.SIGTERM)
    assert gateway.until(Goodbye).reason
    assert process.wait() == 0


def test_a_worker_that_is_turned_away_ends_and_is_not_started_again(gateway: Gateway, start: Start) -> None:
    process = start()
    gateway.meet()
    gateway.send(Rejected(incarnation=gateway.incarnation, reason="it speaks protocol 9"))
    assert process.wait() == EXIT_CONFIGURATION
    assert "it speaks protocol 9" in process.log()


def test_a_worker_whose_gateway_comes_back_introduces_itself_without_its_rows(
    gateway: Gateway, start: Start
) -> None:
    start("--step-ms", "5")
    hello = gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(Heartbeat, lambda beat: beat.running == 1)
    gateway.close()
    gateway.incarnation = "gateway-2"
    gateway.open()
    assert gateway.meet() == hello
    gateway.until(Heartbeat, lambda beat: beat.running == 0)
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"


# --- rows without a gateway ---------------------------------------------------------------------------


def deltas_until_the_end(gateway: Gateway, id: str) -> list[Delta]:
    """Return the deltas of a request up to its end, which must be a good one."""
    found: list[Delta] = []
    while True:
        message = gateway.next()
        if isinstance(message, StepOutputs):
            found += [delta for delta in message.deltas if delta.id == id]
        if isinstance(message, Finished) and message.id == id:
            return found
        assert not isinstance(message, Failed)


def begin(gateway: Gateway, start: Start, *requests: str) -> list[Delta]:
    """Start a worker that keeps its rows, with these requests; return the first request's first deltas."""
    start("--step-ms", "5")
    gateway.orphan_s = 30.0
    gateway.meet()
    for id in requests:
        gateway.generate(id, f"{id} on !tokens=60")
    return [delta for delta in gateway.until(StepOutputs).deltas if delta.id == requests[0]]


@pytest.mark.parametrize("known", [0, 1])
def test_a_row_runs_on_without_a_gateway_and_the_next_one_gets_what_it_lacks(
    gateway: Gateway, start: Start, known: int
) -> None:
    first = begin(gateway, start, "a", "b")
    gateway.die("gateway-2")
    hello = gateway.until(Hello)
    rows = {row.id: row for row in hello.rows}
    assert rows["a"].whole
    assert rows["a"].first == 0
    assert rows["a"].deltas >= len(first)
    gateway.welcome()
    gateway.adopt(AdoptedRow(id="a", deltas=known, accepted=bool(known), reused=bool(known)))
    if not known:
        assert gateway.until(Accepted).id == "a"
        assert gateway.until(PrefixHit).id == "a"
    again = deltas_until_the_end(gateway, "a")
    assert [delta.sequence for delta in again] == list(range(known, 61))
    # Nothing of the other one comes: it was not adopted.
    assert gateway.until(Heartbeat, lambda beat: not beat.rows).running == 0
    gateway.generate("c", "word !tokens=1")
    assert gateway.until(Finished).id == "c"


def test_a_row_that_ends_without_a_gateway_is_told_to_the_next_one(gateway: Gateway, start: Start) -> None:
    process = start("--step-ms", "1")
    gateway.orphan_s = 30.0
    gateway.meet()
    gateway.generate("a", "word !tokens=20")
    gateway.until(StepOutputs)
    gateway.close()
    eventually(lambda: "1 requests run on without a gateway" in process.log(), within_s=WAIT_S)
    gateway.incarnation = "gateway-2"
    gateway.open()
    hello = gateway.until(Hello, lambda hello: hello.rows)
    gateway.welcome()
    gateway.adopt(AdoptedRow(id="a", deltas=3, accepted=True, reused=True))
    assert [delta.sequence for delta in deltas_until_the_end(gateway, "a")] == list(range(3, 21))
    assert [row.id for row in hello.rows] == ["a"]


def test_each_token_is_computed_once_however_often_its_gateway_dies(gateway: Gateway, start: Start) -> None:
    begin(gateway, start, "undisturbed")
    deltas_until_the_end(gateway, "undisturbed")
    steps = gateway.until(Heartbeat, lambda beat: not beat.rows).steps
    gateway.generate("a", "disturbed on !tokens=60")
    gateway.until(StepOutputs)
    for number in range(2, 6):
        gateway.die(f"gateway-{number}")
        hello = gateway.until(Hello)
        gateway.welcome()
        gateway.adopt(*(AdoptedRow(id=row.id, deltas=row.deltas, accepted=True) for row in hello.rows))
    deltas_until_the_end(gateway, "a")
    assert gateway.until(Heartbeat, lambda beat: not beat.rows).steps == 2 * steps


def test_rows_that_nobody_adopts_end_in_time(gateway: Gateway, start: Start) -> None:
    process = start("--step-ms", "5")
    gateway.orphan_s = 0.3
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    gateway.close()
    eventually(lambda: "1 requests end: no gateway has adopted them" in process.log(), within_s=WAIT_S)
    gateway.open()
    assert gateway.until(Hello).rows == []
    gateway.welcome()
    gateway.until(Heartbeat, lambda beat: not beat.rows)


def test_rows_end_if_the_reply_of_the_next_gateway_never_comes(gateway: Gateway, start: Start) -> None:
    begin(gateway, start, "a")
    gateway.die("gateway-2")
    assert gateway.until(Hello).rows
    gateway.orphan_s = 0.3
    gateway.welcome()
    gateway.until(Heartbeat, lambda beat: not beat.rows)


def test_rows_end_with_a_gateway_of_an_earlier_version(gateway: Gateway, start: Start) -> None:
    begin(gateway, start, "a")
    gateway.die("gateway-2")
    assert gateway.until(Hello).rows
    gateway.orphan_s = 0.0
    gateway.welcome()
    gateway.until(Heartbeat, lambda beat: not beat.rows)
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"


def test_a_request_of_a_gateway_whose_reply_was_lost_ends_the_others(gateway: Gateway, start: Start) -> None:
    begin(gateway, start, "a")
    gateway.die("gateway-2")
    assert gateway.until(Hello).rows
    gateway.welcome()
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"
    gateway.until(Heartbeat, lambda beat: not beat.rows)


def test_what_a_dead_gateway_says_is_not_heard(gateway: Gateway, start: Start) -> None:
    begin(gateway, start, "a")
    gateway.die("gateway-2")
    hello = gateway.until(Hello)
    gateway.welcome()
    gateway.incarnation = "gateway-1"
    gateway.generate("late", "word !tokens=1")
    gateway.adopt()
    gateway.incarnation = "gateway-2"
    gateway.adopt(AdoptedRow(id="a", deltas=hello.rows[0].deltas, accepted=True))
    end = gateway.until(Finished)
    assert (end.id, end.usage.completion_tokens) == ("a", 61)


def test_a_stop_does_not_wait_for_rows_without_a_gateway(gateway: Gateway, start: Start) -> None:
    process = start("--step-ms", "5", "--drain-timeout", "50")
    gateway.orphan_s = 30.0
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    gateway.close()
    eventually(lambda: "1 requests run on without a gateway" in process.log(), within_s=WAIT_S)
    process.kill(signal.SIGTERM)
    assert process.wait() == 0


def test_a_worker_that_meets_another_gateway_drops_what_it_ran_for_the_first(
    gateway: Gateway, start: Start
) -> None:
    start("--step-ms", "5")
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(Heartbeat, lambda beat: beat.running == 1)
    gateway.incarnation = "gateway-2"
    gateway.welcome()
    gateway.until(Hello)
    gateway.until(Heartbeat, lambda beat: beat.running == 0)


def test_a_worker_that_is_told_to_stop_says_goodbye_and_ends_well(gateway: Gateway, start: Start) -> None:
    process = start("--step-ms", "5")
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    process.kill(signal.SIGTERM)
    gateway.until(Goodbye)
    assert process.wait() == 0


@pytest.mark.parametrize(("flag", "status"), [("--broken", EXIT_CONFIGURATION), ("--crowded", EXIT_NO_ROOM)])
def test_a_worker_without_a_model_says_by_its_status_whether_to_try_again(
    flag: str, status: int, start: Start
) -> None:
    process = start(flag)
    assert process.wait() == status
    assert "error: scripted: " in process.log()


def test_a_worker_that_keeps_failing_ends_so_that_it_is_started_anew(gateway: Gateway, start: Start) -> None:
    process = start()
    gateway.meet()
    for n in range(10):
        gateway.generate(f"r{n}", "word !fail=0")
        assert gateway.until(Failed).id == f"r{n}"
    assert process.wait() not in (0, EXIT_CONFIGURATION)
    assert "10 failures in a row" in process.log()


@pytest.mark.parametrize(("code", "status"), [("OutOfMemory", EXIT_NO_ROOM), ("Timeout", EXIT_DEVICE)])
def test_a_worker_whose_gpu_has_failed_says_so_and_ends_at_once(
    code: str, status: int, gateway: Gateway, start: Start
) -> None:
    process = start()
    gateway.meet()
    gateway.generate("neighbour", "on and on !tokens=100000 !slow=10")
    gateway.until(StepOutputs)
    gateway.generate("fatal", f"!gpu={code}")
    goodbye = gateway.until(Goodbye)
    assert goodbye.died
    assert f"kIOGPUCommandBufferCallbackError{code}" in goodbye.reason
    assert process.wait() == status
    assert goodbye.reason in process.log()
