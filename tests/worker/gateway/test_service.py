"""A worker process with a scripted gateway: handshake, requests and exit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol import wire
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    PrefixHit,
    Ready,
    Rejected,
    StepOutputs,
    ToGateway,
)
from protocol.settings.reader import EXIT_CONFIGURATION
from protocol.types import AdoptedRow, Delta, MemoryPressure
from tests.scripted_worker.engine import TOKEN_BYTES
from tests.system import eventually
from tests.worker.gateway.conftest import SharedWorker, Start
from tests.worker.gateway.fake_gateway import WAIT_S, Gateway
from worker.core.memory_reservations import BLOCK_TOKENS
from worker.process.exit_codes import EXIT_DEVICE, EXIT_NO_ROOM


def test_a_worker_says_who_it_is_how_it_loads_and_that_it_is_ready(gateway: Gateway, start: Start) -> None:
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
    # Behind the initial state comes every later report, however far the load was at the handshake.
    assert loading[1:] == list(range(11_000 - 1000 * len(loading), 10_000, 1000))
    ready = said[-1]
    assert isinstance(ready, Ready)
    assert (ready.model, ready.running_max) == ("m", 3)
    assert ready.cache_bytes_max == 1000 * TOKEN_BYTES
    fits = 1000 // BLOCK_TOKENS * BLOCK_TOKENS - 1  # a row always has room to grow
    assert ready.tokens_max == ready.context_length == fits
    beat = gateway.until(Heartbeat)
    assert (beat.running, beat.waiting, beat.cache_bytes) == (0, 0, 0)


def test_a_worker_asked_who_it_is_says_so_once_for_each_time(next_gateway: Gateway) -> None:
    gateway = next_gateway
    hello = gateway.meet()
    for _ in range(2):
        # A gateway that does not know the worker asks with a Welcome, and answers the Hello with another.
        gateway.welcome()
        assert gateway.until(Hello) == hello
        gateway.welcome()
        said = gateway.during_beats(4)
        assert [m for m in said if isinstance(m, Hello)] == []
        assert len([m for m in said if isinstance(m, Ready)]) == 1


def test_a_request_is_accepted_answered_and_ended(met: Gateway) -> None:
    met.generate("a", "three words here !tokens=5")
    said = []
    while not said or not isinstance(said[-1], Finished):
        message = met.next()
        if not isinstance(message, Heartbeat):
            said.append(message)
    assert isinstance(said[0], Accepted)
    assert said[0].prompt_tokens == 4
    deltas = [delta for message in said if isinstance(message, StepOutputs) for delta in message.deltas]
    assert [delta.sequence for delta in deltas] == list(range(6))
    end = said[-1]
    assert isinstance(end, Finished)
    assert (end.id, end.reason, end.usage.completion_tokens) == ("a", "stop", 6)


def test_a_cancelled_request_leaves_and_is_not_mentioned_again(met: Gateway) -> None:
    met.generate("a", "on and on !tokens=100000")
    met.until(StepOutputs)
    assert met.until(Heartbeat, lambda beat: beat.running == 1).steps > 0
    for id in ("a", "a", "never was"):
        met.cancel(id)
    met.until(Heartbeat, lambda beat: beat.running == 0)
    said = met.during_beats(2)
    assert all(isinstance(message, Heartbeat) for message in said)
    assert [m.cache_bytes for m in said if isinstance(m, Heartbeat)] == [0, 0]


def test_the_memory_pressure_of_the_machine_is_told_and_acted_on(
    gateway: Gateway, start: Start, tmp_path: Path
) -> None:
    stalls = tmp_path / "memory.pressure"
    stalls.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    process = start("--pressure-file", str(stalls))
    gateway.meet()
    assert gateway.until(Heartbeat, lambda beat: beat.preparation is not None).pressure == MemoryPressure()
    stalls.write_text("some avg10=80.00 avg60=9.00 avg300=1.00 total=9\nfull avg10=55.00\n")
    beat = gateway.until(Heartbeat, lambda beat: beat.pressure != MemoryPressure())
    assert beat.pressure == MemoryPressure(level="critical", relief="drop_idle")
    gateway.generate("a", "word !tokens=1")
    assert gateway.until(Finished).id == "a"
    assert process.log().count("memory pressure of the machine: critical; relief: drop_idle") == 1


def test_garbage_is_dropped_and_what_follows_is_heard(met: Gateway, worker: SharedWorker) -> None:
    for garbage in ([b""], [b"\xc1"], [b"\x91" * 5000], [b"\xff" * 64, b"media"]):
        met.send_frames(*garbage)
    met.send_frames(*wire.encode(Heartbeat(incarnation="g", running=0, waiting=0, steps=0)))
    met.generate("a", "word !tokens=1")
    assert met.until(Finished).id == "a"
    assert worker.process.log().count("dropped an invalid message") == 5


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


def begin(gateway: Gateway, *requests: str) -> list[Delta]:
    """Let the worker keep its rows, with these requests; return the first request's first deltas."""
    gateway.orphan_s = 30.0
    gateway.meet()
    for id in requests:
        gateway.generate(id, f"{id} on !tokens=60")
    return [delta for delta in gateway.until(StepOutputs).deltas if delta.id == requests[0]]


@pytest.mark.parametrize("known", [0, 1])
def test_a_row_runs_on_and_the_next_gateway_gets_what_it_lacks(next_gateway: Gateway, known: int) -> None:
    gateway = next_gateway
    first = begin(gateway, "a", "b")
    gateway.die()
    rows = {row.id: row for row in gateway.until(Hello).rows}
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


def test_an_end_without_a_gateway_is_told_to_the_next(next_gateway: Gateway, worker: SharedWorker) -> None:
    gateway, told = next_gateway, "1 requests run on without a gateway"
    before = worker.process.log().count(told)
    gateway.orphan_s = 30.0
    gateway.meet()
    gateway.generate("a", "word !tokens=20")
    gateway.until(StepOutputs)
    gateway.close()
    eventually(lambda: worker.process.log().count(told) > before, within_s=WAIT_S)
    gateway.die()
    hello = gateway.until(Hello, lambda hello: hello.rows)
    gateway.welcome()
    gateway.adopt(AdoptedRow(id="a", deltas=3, accepted=True, reused=True))
    assert [delta.sequence for delta in deltas_until_the_end(gateway, "a")] == list(range(3, 21))
    assert [row.id for row in hello.rows] == ["a"]


def test_each_token_is_computed_once_however_often_its_gateway_dies(next_gateway: Gateway) -> None:
    gateway = next_gateway
    gateway.orphan_s = 30.0
    gateway.meet()
    steps = [gateway.until(Heartbeat, lambda beat: not beat.rows).steps]
    for id, deaths in (("undisturbed", 0), ("disturbed", 4)):
        gateway.generate(id, f"{id} on !tokens=60")
        gateway.until(StepOutputs)
        for _ in range(deaths):
            gateway.die()
            hello = gateway.until(Hello)
            gateway.welcome()
            gateway.adopt(*(AdoptedRow(id=row.id, deltas=row.deltas, accepted=True) for row in hello.rows))
        deltas_until_the_end(gateway, id)
        steps.append(gateway.until(Heartbeat, lambda beat: not beat.rows).steps)
    assert steps[2] - steps[1] == steps[1] - steps[0]


def test_rows_that_nobody_adopts_end_in_time(next_gateway: Gateway, worker: SharedWorker) -> None:
    gateway = next_gateway
    gateway.orphan_s = 0.3
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    gateway.close()
    eventually(lambda: "1 requests end: no gateway has adopted them" in worker.process.log(), within_s=WAIT_S)
    gateway.open()
    assert gateway.until(Hello).rows == []
    gateway.welcome()
    gateway.until(Heartbeat, lambda beat: not beat.rows)


@pytest.mark.parametrize("orphan_s", [0.3, 0.0], ids=["that never adopts them", "of an earlier version"])
def test_rows_end_with_a_gateway(next_gateway: Gateway, orphan_s: float) -> None:
    gateway = next_gateway
    begin(gateway, "a")
    gateway.die()
    assert gateway.until(Hello).rows
    gateway.orphan_s = orphan_s
    gateway.welcome()
    gateway.until(Heartbeat, lambda beat: not beat.rows)
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"


def test_a_request_of_a_gateway_whose_reply_was_lost_ends_the_others(next_gateway: Gateway) -> None:
    gateway = next_gateway
    begin(gateway, "a")
    gateway.die()
    assert gateway.until(Hello).rows
    gateway.welcome()
    gateway.generate("b", "word !tokens=1")
    assert gateway.until(Finished).id == "b"
    gateway.until(Heartbeat, lambda beat: not beat.rows)


def test_what_a_dead_gateway_says_is_not_heard(next_gateway: Gateway) -> None:
    gateway = next_gateway
    begin(gateway, "a")
    dead = gateway.incarnation
    gateway.die()
    alive = gateway.incarnation
    hello = gateway.until(Hello)
    gateway.welcome()
    gateway.incarnation = dead
    gateway.generate("late", "word !tokens=1")
    gateway.adopt()
    gateway.incarnation = alive
    gateway.adopt(AdoptedRow(id="a", deltas=hello.rows[0].deltas, accepted=True))
    end = gateway.until(Finished)
    assert (end.id, end.usage.completion_tokens) == ("a", 61)


# --- the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_orphaned", [False, True])
def test_a_stopped_worker_waits_for_no_orphans(gateway: Gateway, start: Start, is_orphaned: bool) -> None:
    process = start("--step-ms", "5", "--drain-timeout", "50" if is_orphaned else "0.2")
    gateway.orphan_s = 30.0
    gateway.meet()
    gateway.generate("a", "on and on !tokens=100000")
    gateway.until(StepOutputs)
    if is_orphaned:
        gateway.close()
        eventually(lambda: "1 requests run on without a gateway" in process.log(), within_s=WAIT_S)
    process.kill(signal.SIGTERM)
    if not is_orphaned:
        gateway.until(Goodbye)
    assert process.wait() == 0


@pytest.mark.parametrize(("flag", "status"), [("--broken", EXIT_CONFIGURATION), ("--crowded", EXIT_NO_ROOM)])
def test_exit_status_says_whether_to_load_a_model_again(flag: str, status: int, start: Start) -> None:
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


def test_a_worker_whose_gpu_has_failed_says_so_and_ends_at_once(gateway: Gateway, start: Start) -> None:
    process = start()
    gateway.meet()
    gateway.generate("neighbour", "on and on !tokens=100000 !slow=10")
    gateway.until(StepOutputs)
    gateway.generate("fatal", "!gpu=Timeout")
    goodbye = gateway.until(Goodbye)
    assert goodbye.died
    assert "kIOGPUCommandBufferCallbackErrorTimeout" in goodbye.reason
    assert process.wait() == EXIT_DEVICE
    assert goodbye.reason in process.log()
