"""Routing: a request goes to a worker that holds its prefix, unless that worker is busier. Affinity."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch import routing
from broker.dispatch.cost_model import Throughput
from broker.dispatch.fleet import Worker
from broker.dispatch.prefix_hashes import PrefixHashes
from broker.dispatch.routing import (
    EXCESS_BEGUN_ALIKE,
    EXCESS_REQUESTS,
    NOTHING,
    SHARED_S,
    Affinity,
    PrefixOverlap,
    RouteScore,
    WorkerLoad,
    best,
    least_loaded,
)
from protocol.conversation import pack
from protocol.errors import Code
from protocol.messages import Generate, Ready
from protocol.types import Timings
from tests.broker.dispatcher_line import Line, refusal
from tests.factories import accepted, cleared, events, finished, request

SYSTEM = "You answer in short sentences. " * 40


def asked(id: str, *turns: str, **told: Any) -> Generate:
    """Return a request whose conversation starts with a shared system prompt."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    messages = [{"role": "system", "content": SYSTEM}, *said]
    return request(id, messages=messages, max_tokens=64, **told)


def two(**told: Any) -> Line:
    line = Line(waiting_max=64, **told)
    for name in ("w1", "w2"):
        line.serving(name, rows=8)
    return line


def where(line: Line, request: Generate) -> str:
    """Dispatch the request and return its worker. Its client stays connected."""
    flight = line.submit(request)
    assert flight.attempt is not None
    return flight.attempt.worker


def ask(line: Line, request: Generate) -> str:
    """Serve the request to its end, and return its worker."""
    with line.dispatcher.submit(line.dispatcher.find("m"), [request], ()) as [flight]:
        assert flight.attempt is not None
        worker = flight.attempt.worker
        line.say(worker, accepted(worker, flight.attempt.id), events(worker, flight.attempt.id, "x"))
        line.say(worker, finished(worker, flight.attempt.id, 1))
    return worker


# --- the rule ----------------------------------------------------------------------------------------


def worker_load(name: str, load_s: float, assigned: int = 0, speed: float = 30.0) -> WorkerLoad:
    return WorkerLoad(
        Worker(name, "m", 1, connected_at=0.0, last_message_at=0.0),
        Throughput(1000.0, speed),
        assigned,
        load_s,
    )


BIDS = st.lists(
    st.builds(
        RouteScore,
        st.builds(worker_load, st.just("w"), st.floats(0, 100), st.integers(0, 64), st.floats(1, 100)),
        st.floats(0.1, 20),
        st.builds(PrefixOverlap, st.floats(0, 1), st.booleans()),
    ),
    min_size=1,
    max_size=8,
)


@given(BIDS)
def test_it_goes_to_the_least_loaded_or_to_one_near_it_that_has_more(scores: list[RouteScore]) -> None:
    least, chosen = least_loaded(scores), best(scores)
    assert chosen.overlap.share >= least.overlap.share
    assert chosen.done_s - least.done_s <= EXCESS_REQUESTS * least.cost_s
    for other in scores:
        if other.overlap.share > chosen.overlap.share:
            allowed = other.overlap.share * (EXCESS_REQUESTS if other.overlap.own else EXCESS_BEGUN_ALIKE)
            is_slow = other.done_s - least.done_s > allowed * least.cost_s
            throughput = other.worker_load.speed.answer / least.worker_load.speed.answer
            is_full = other.worker_load.assigned - throughput * least.worker_load.assigned > allowed
            assert is_slow or is_full, "no rule excludes the worker with the larger overlap"
    bare = [RouteScore(score.worker_load, score.cost_s, NOTHING) for score in scores]
    assert best(bare).done_s == least_loaded(bare).done_s
    # The least loaded is done first, unless it has far more than one that is done soon.
    first = min(scores, key=lambda score: (score.done_s, score.worker_load.assigned))
    if least is first:
        for score in scores:
            is_late = score.done_s - first.done_s > EXCESS_REQUESTS * first.cost_s
            assert is_late or first.ahead_of(score) <= EXCESS_REQUESTS
    else:
        assert first.ahead_of(least) > EXCESS_REQUESTS
        assert least.done_s - first.done_s <= EXCESS_REQUESTS * first.cost_s


def test_worker_with_fast_prefill_does_not_attract_a_whole_burst() -> None:
    quick, other = worker_load("quick", 0.0), worker_load("other", 0.0)
    for number in range(64):
        known = PrefixOverlap(1.0, own=True) if number else NOTHING
        chosen = best(
            [RouteScore(quick, 0.5, known), RouteScore(other, 2.0, known if other.assigned else NOTHING)]
        )
        chosen.worker_load.load_s += 0.1  # only the answer remains to be computed
        chosen.worker_load.assigned += 1
    assert quick.assigned - other.assigned <= 2 * EXCESS_REQUESTS


def test_a_short_beginning_moves_nobody_to_a_busier_worker() -> None:
    busy, idle = worker_load("busy", 3.0, 2), RouteScore(worker_load("idle", 0.0), 1.0, NOTHING)
    assert best([RouteScore(busy, 1.0, PrefixOverlap(0.1, own=True)), idle]) is idle
    assert best([RouteScore(busy, 1.0, PrefixOverlap(0.9, own=False)), idle]) is idle, "a shared prefix"
    assert best([RouteScore(busy, 1.0, PrefixOverlap(0.9, own=True)), idle]).worker_load is busy


# --- through the dispatcher --------------------------------------------------------------------------


def test_a_conversation_stays_with_the_worker_that_ran_it() -> None:
    line = two()
    homes: dict[int, list[str]] = {talk: [] for talk in range(6)}
    for turn in range(5):
        for talk, before in homes.items():
            turns = [f"{talk}: {number}" for number in range(2 * turn + 1)]
            before.append(ask(line, asked(f"{talk}.{turn}", *turns)))
    assert all(len(set(workers)) == 1 for workers in homes.values())
    home = homes[0][0]
    [other] = {"w1", "w2"} - {home}
    line.unreachable.add(home)
    flight = line.submit(asked("moves", *turns))
    line.dispatcher.lost(home)
    assert flight.attempt is not None
    assert flight.attempt.worker == other
    line.unreachable.add(other)
    assert refusal(line.submit, asked("refused", "x")).code is Code.WORKER_UNAVAILABLE
    # Told to go by load, it goes wherever less is to do.
    line = two(method="load")
    assert where(line, asked("a", "one")) != where(line, asked("b", "one", "two", "three"))
    assert len(line.dispatcher.failover.routing.affinity) == 0, "prefixes are remembered"


def test_a_flood_on_one_prompt_spreads() -> None:
    ahead = 0
    line = two()
    so_far: Counter[str] = Counter()
    for number in range(64):
        so_far[where(line, asked(str(number), "the same"))] += 1
        ahead = max(ahead, abs(so_far["w1"] - so_far["w2"]))
    assert ahead <= EXCESS_REQUESTS + 1


def test_long_prompts_count_for_what_they_are_and_not_for_one() -> None:
    line = two()
    long = where(
        line, replace(asked("long", "x"), messages=pack([{"role": "user", "content": "y" * 400_000}]))
    )
    others = [where(line, asked(str(number), f"{number} short")) for number in range(6)]
    assert long not in others


def test_a_worker_that_was_measured_to_be_slow_gets_less() -> None:
    line = two()
    for worker, decode_s in (("w1", 8.0), ("w2", 2.0)):
        found = line.dispatcher.fleet.get(worker)
        assert found is not None
        timings = Timings(prefill_s=decode_s / 8, decode_s=decode_s)
        found.throughput.observe(finished(worker, "x", 64, prompt=1000, timings=timings))
    counts = Counter(where(line, asked(str(number), f"{number}")) for number in range(20))
    assert 3 <= counts["w2"] / counts["w1"] <= 5


def test_full_worker_is_skipped_for_one_with_free_rows() -> None:
    line = Line(waiting_max=0)
    for name, rows in (("w1", 1), ("w2", 8)):
        line.serving(name, rows=rows)
    counts = Counter(where(line, asked(str(number), "the same")) for number in range(9))
    assert counts == {"w1": 1, "w2": 8}


def test_affinity_is_recorded_while_only_one_worker_is_connected() -> None:
    line = two()
    ask(line, asked("warm", "up"))
    line.dispatcher.lost("w2")
    assert ask(line, asked("a", "x")) == "w1"
    line.serving("w3", rows=8)
    for _ in range(3):
        where(line, asked(f"other {_}", "something", "else", str(_)))
    assert ask(line, asked("a2", "x", "y", "z")) == "w1"
    line.dispatcher.lost("w3", died=False)
    line.clock.now += SHARED_S + 1
    remembered = len(line.dispatcher.failover.routing.affinity)
    ask(line, asked("b", "new words"))
    assert len(line.dispatcher.failover.routing.affinity) == remembered, "still recorded"


# --- lost workers ------------------------------------------------------------------------------------


def test_cleared_prefix_cache_removes_affinity_and_a_cleared_namespace_does_not() -> None:
    line = two()
    home = ask(line, asked("a", "x"))
    known = line.dispatcher.failover.routing.affinity
    for namespace, is_known in (("ann", True), ("", False)):
        with line.dispatcher.clear("m", "c", namespace):
            line.say(home, replace(cleared(home, "c"), namespace=namespace))
        assert (len(known) > 0) == is_known
    ask(line, asked("b", "x", "y", "z"))


def worker(name: str, *, connected_at: float = 0.0, store: str = "") -> Worker:
    ready = Ready(incarnation=name, model="m", context_length=1, running_max=1, store=store)
    return Worker(name, "m", 1, connected_at=connected_at, last_message_at=connected_at, ready=ready)


def prompt(*words: str) -> PrefixHashes:
    """Return the prefix hashes of a prompt. Each word is ten bytes."""
    hashes, said = [], ""
    for number, word in enumerate(words):
        said += f"{word} "
        hashes.append((hashlib.blake2b(said.encode(), digest_size=16).digest(), 10 * (number + 1)))
    return PrefixHashes(tuple(hashes), 10 * len(words))


A, B = worker("a"), worker("b")


def test_a_worker_has_as_much_of_a_prompt_as_the_longest_beginning_that_it_had() -> None:
    known = Affinity()
    known.note(prompt("x", "y", "z"), A, 1.0)
    known.note(prompt("x", "q"), B, 2.0)
    assert known.overlap(prompt("x", "y", "z", "w"), A) == PrefixOverlap(0.75, own=True)
    assert known.overlap(prompt("x", "y", "z", "w"), B) == PrefixOverlap(0.25, own=False)
    assert known.overlap(prompt("y"), A).share == 0.0
    assert known.overlap(PrefixHashes(), A).share == 0.0
    assert known.overlap(prompt("x"), worker("a-again", connected_at=2.0)).share == 0.0, "a successor"
    known.forget("a")
    assert known.overlap(prompt("x", "y", "z", "w"), A).share == 0.0
    assert known.overlap(prompt("x", "y", "z", "w"), B).share == 0.25
    assert len(known) == 2


def test_disk_prefixes_are_attributed_to_workers_that_open_the_store_later() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), worker("old", store="mac:1"), 5.0)
    successor = worker("new", connected_at=6.0, store="mac:1")
    assert known.overlap(prompt("x", "y"), successor).share == 1.0
    before = worker("beside", connected_at=4.0, store="mac:1")
    assert known.overlap(prompt("x", "y"), before).share == 0.0, "it opened the disk store before"
    elsewhere = worker("far", connected_at=6.0, store="other:1")
    assert known.overlap(prompt("x", "y"), elsewhere).share == 0.0
    assert known.overlap(prompt("x", "y"), worker("diskless", connected_at=6.0)).share == 0.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=80))
@example([(0, name) for name in range(13)])
def test_it_is_bounded_and_the_last_ones_are_kept(notes: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "HASHES_MAX", 10)
        known = Affinity()
        for at, (word, name) in enumerate(notes):
            known.note(prompt(str(word)), worker(str(name)), float(at))
            assert known.overlap(prompt(str(word)), worker(str(name))).share == 1.0
        assert len(known) <= 10
        for word in {word for word, _ in notes}:
            have = [name for name in range(13) if known.overlap(prompt(str(word)), worker(str(name))).share]
            assert len(have) <= routing.HOMES_MAX
