"""What is remembered of who ran which prompts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch import affinity
from broker.dispatch.affinity import Affinity, Known
from broker.dispatch.beginnings import Beginnings
from broker.dispatch.fleet import Worker
from protocol.messages import Ready


def worker(name: str, *, met_at: float = 0.0, store: str = "") -> Worker:
    ready = Ready(incarnation=name, model="m", context_length=1, running_max=1, store=store)
    return Worker(name, "m", 1, met_at=met_at, heard_at=met_at, ready=ready)


def prompt(*words: str) -> Beginnings:
    """Each word is ten bytes."""
    marks, said = [], ""
    for number, word in enumerate(words):
        said += f"{word} "
        marks.append((hashlib.blake2b(said.encode(), digest_size=16).digest(), 10 * (number + 1)))
    return Beginnings(tuple(marks), 10 * len(words))


A, B = worker("a"), worker("b")


def test_a_worker_has_as_much_of_a_prompt_as_the_longest_beginning_that_it_had() -> None:
    known = Affinity()
    known.note(prompt("x", "y", "z"), A, 1.0)
    known.note(prompt("x", "q"), B, 2.0)
    assert known.known(prompt("x", "y", "z", "w"), A).share == 0.75
    assert known.known(prompt("x", "y", "z", "w"), B).share == 0.25
    assert known.known(prompt("y"), A).share == 0.0
    assert known.known(Beginnings(), A).share == 0.0


def test_one_that_has_died_is_not_taken_for_its_successor() -> None:
    known = Affinity()
    known.note(prompt("x"), A, 1.0)
    assert known.known(prompt("x"), worker("a-again", met_at=2.0)).share == 0.0


def test_what_was_written_to_a_disk_is_known_to_those_who_open_it_later() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), worker("old", store="mac:1"), 5.0)
    successor = worker("new", met_at=6.0, store="mac:1")
    assert known.known(prompt("x", "y"), successor).share == 1.0
    before = worker("beside", met_at=4.0, store="mac:1")
    assert known.known(prompt("x", "y"), before).share == 0.0, "it has looked at the disk before"
    elsewhere = worker("far", met_at=6.0, store="other:1")
    assert known.known(prompt("x", "y"), elsewhere).share == 0.0
    assert known.known(prompt("x", "y"), worker("diskless", met_at=6.0)).share == 0.0


def test_a_worker_that_was_told_to_forget_has_nothing() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), A, 1.0)
    known.note(prompt("x"), B, 1.0)
    known.forget("a")
    assert (known.known(prompt("x", "y"), A).share, known.known(prompt("x", "y"), B).share) == (0.0, 0.5)
    assert len(known) == 1


def test_what_goes_on_with_a_whole_prompt_is_told_from_what_only_begins_alike() -> None:
    known = Affinity()
    known.note(prompt("x", "y"), A, 1.0)
    known.note(prompt("x", "y", "z"), A, 2.0)
    assert known.known(prompt("x", "y", "q"), A) == Known(2 / 3, own=True)
    assert known.known(prompt("x", "q", "q", "q"), A) == Known(0.25, own=False)
    known.note(prompt("x"), A, 3.0)
    assert known.known(prompt("x", "q"), A) == Known(0.5, own=True)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=80))
def test_it_is_bounded_and_the_last_ones_are_kept(notes: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(affinity, "MARKS_MAX", 10)
        known = Affinity()
        for at, (word, name) in enumerate(notes):
            known.note(prompt(str(word)), worker(str(name)), float(at))
            assert known.known(prompt(str(word)), worker(str(name))).share == 1.0
        assert len(known) <= 10
        for word in {word for word, _ in notes}:
            have = [name for name in range(13) if known.known(prompt(str(word)), worker(str(name))).share]
            assert len(have) <= affinity.HOMES_MAX
