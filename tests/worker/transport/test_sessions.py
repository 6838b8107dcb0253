"""A worker with two gateways, while one replaces the other: each gets what concerns it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Draining,
    Finished,
    Goodbye,
    HandedOver,
    Heartbeat,
    Hello,
    Ready,
    Rejected,
    StepOutputs,
    ToGateway,
    Welcome,
)
from protocol.types import Delta
from tests.system import Process
from tests.worker.transport.test_service import Gateway

LONG = "!tokens=400"


class Successor(Gateway):
    """The gateway that binds the endpoint after another one has renamed its socket."""

    def __init__(self, folder: Path, old: Gateway) -> None:
        self.old_endpoint = f"ipc://{folder}/old"
        (folder / "line").rename(folder / "old")
        super().__init__(folder)
        self.incarnation = "gateway-2"
        old.send(HandedOver(incarnation=old.incarnation))


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path)
    yield gateway
    gateway.end()


@pytest.fixture
def worker(old: Gateway, tmp_path: Path) -> Iterator[Process]:
    flags = ["--endpoint", old.endpoint, "--step-ms", "5", "--drain-timeout", "10"]
    process = Process("worker", ["tests.scripted_worker", *flags], tmp_path)
    old.meet()
    yield process
    process.stop()


@pytest.fixture
def new(old: Gateway, worker: Process, tmp_path: Path) -> Iterator[Successor]:
    old.generate("early", LONG)
    old.until(StepOutputs)
    gateway = Successor(tmp_path, old)
    gateway.meet()
    yield gateway
    gateway.end()


def deltas_to_the_end(gateway: Gateway) -> tuple[list[Delta], Finished]:
    deltas: list[Delta] = []
    while not isinstance(message := gateway.next(), Finished):
        deltas += message.deltas if isinstance(message, StepOutputs) else []
    return deltas, message


def test_each_gateway_gets_the_output_of_its_requests_only(old: Gateway, new: Successor) -> None:
    new.generate("late", "!tokens=100")
    for gateway, id in ((new, "late"), (old, "early")):
        deltas, end = deltas_to_the_end(gateway)
        assert {delta.id for delta in deltas} | {end.id} == {id}
        numbers = [delta.sequence for delta in deltas]
        assert numbers == sorted(set(numbers))


def rows(messages: list[ToGateway]) -> set[str]:
    return {row.id for message in messages if isinstance(message, Heartbeat) for row in message.rows}


def test_each_gateway_is_told_of_its_own_rows_only(old: Gateway, new: Successor) -> None:
    new.generate("late", LONG)
    new.until(StepOutputs)
    assert rows(old.during_beats(3)) == {"early"}
    assert rows(new.during_beats(3)) == {"late"}
    beat = new.until(Heartbeat)
    assert beat.running == 2  # the worker's load is that of both


def test_requests_of_a_gateway_that_has_ended_end_too(old: Gateway, new: Successor) -> None:
    old.close()
    new.until(Heartbeat, lambda beat: beat.running == 0)
    new.generate("late", "!tokens=5")
    assert new.until(Finished).id == "late"


def test_the_old_gateway_can_cancel_and_reject_without_harm(old: Gateway, new: Successor) -> None:
    old.send(Cancel(incarnation=old.incarnation, id="early"))
    new.until(Heartbeat, lambda beat: beat.running == 0)
    old.send(Rejected(incarnation=old.incarnation, reason="it ends"))
    new.generate("late", "!tokens=5")
    assert new.until(Finished).id == "late"


def test_a_stop_waits_for_the_requests_of_both(old: Gateway, new: Successor, worker: Process) -> None:
    new.generate("late", "!tokens=100")
    new.until(StepOutputs)
    worker.kill(15)
    assert old.until(Draining)
    assert new.until(Draining)
    assert new.until(Finished).id == "late"
    assert old.until(Finished).id == "early"
    assert old.until(Goodbye)
    assert new.until(Goodbye)
    assert worker.wait() == 0


def test_a_worker_that_starts_meanwhile_connects_to_the_old_gateway_too(
    old: Gateway, new: Successor, worker: Process, tmp_path: Path
) -> None:
    worker.kill()
    worker.wait()
    flags = ["--endpoint", new.endpoint]
    process = Process("worker-2", ["tests.scripted_worker", *flags], tmp_path)
    try:
        hello = new.until(Hello)
        incarnation, version = new.incarnation, PROTOCOL_VERSION
        new.send(Welcome(incarnation=incarnation, version=version, predecessor=new.old_endpoint))
        new.until(Ready)
        assert old.until(Hello).incarnation == hello.incarnation
        old.welcome()
        old.generate("resumed", "!tokens=5")
        assert old.until(Finished, lambda end: end.id == "resumed")
        new.generate("late", "!tokens=5")
        assert new.until(Finished).id == "late"
    finally:
        process.stop()


def test_only_the_gateway_itself_can_hand_over_and_only_once(
    old: Gateway, new: Successor, tmp_path: Path
) -> None:
    new.send(HandedOver(incarnation="another"))
    old.send(HandedOver(incarnation=old.incarnation))
    new.generate("late", "!tokens=5")
    assert new.until(Finished).id == "late"
    assert deltas_to_the_end(old)[1].id == "early"


def test_a_gateway_that_is_gone_already_is_no_obstacle(old: Gateway, worker: Process, tmp_path: Path) -> None:
    nowhere = f"ipc://{tmp_path}/nowhere"
    old.send(Welcome(incarnation=old.incarnation, version=PROTOCOL_VERSION, predecessor=nowhere))
    old.generate("a", "!tokens=5")
    assert old.until(Finished).id == "a"
