"""Affinity: the index of prompt prefixes by worker."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch import routing
from broker.dispatch.fleet import Worker
from broker.dispatch.prefix_hashes import PrefixHashes
from broker.dispatch.routing import Affinity, PrefixOverlap
from protocol.messages import Ready


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
    assert known.overlap(prompt("x", "y", "z", "w"), A).share == 0.75
    assert known.overlap(prompt("x", "y", "z", "w"), B).share == 0.25
    assert known.overlap(prompt("y"), A).share == 0.0
    assert known.overlap(PrefixHashes(), A).share == 0.0


def test_successor_of_a_dead_worker_has_no_prefix_overlap() -> None:
    known = Affinity()
    known.note(prompt("x"), A, 1.0)
    assert known.overlap(prompt("x"), worker("a-again", connected_at=2.0)).share == 0.0


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


def test_a_worker_that_was_told_to_forget_has_nothing() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), A, 1.0)
    known.note(prompt("x"), B, 1.0)
    known.forget("a")
    assert (known.overlap(prompt("x", "y"), A).share, known.overlap(prompt("x", "y"), B).share) == (0.0, 0.5)
    assert len(known) == 1


def test_continuation_of_a_whole_prompt_is_distinguished_from_shared_prefix() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), A, 1.0)
    known.note(prompt("x", "y", "z"), A, 2.0)
    assert known.overlap(prompt("x", "y", "q"), A) == PrefixOverlap(2 / 3, own=True)
    assert known.overlap(prompt("x", "q", "q", "q"), A) == PrefixOverlap(0.25, own=False)
    known.note(prompt("x"), A, 3.0)
    assert known.overlap(prompt("x", "q"), A) == PrefixOverlap(0.5, own=True)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=80))
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
