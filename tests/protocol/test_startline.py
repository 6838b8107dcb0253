"""The line between a supervisor and a worker's process."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import startline
from protocol.startline import Starting


def test_a_process_without_one_finds_none() -> None:
    assert Starting.find({}) is None
    assert Starting.find({startline.VARIABLE: "x"}) is None


def test_what_is_found_is_nobody_elses_and_no_child_inherits_it() -> None:
    ours, theirs = socket.socketpair()
    environ = {startline.VARIABLE: str(theirs.detach()), "OTHER": "1"}
    with ours:
        os.set_inheritable(int(environ[startline.VARIABLE]), True)
        line = Starting.find(environ)
        assert line is not None
        assert environ == {"OTHER": "1"}
        line.say("there")
        assert ours.recv(100) == b"there\n"
        line.hand_on(environ)
        assert not os.get_inheritable(int(environ[startline.VARIABLE]))
        again = Starting.find(environ)
        assert again is not None
        again.say("taken")
        again.close()
        assert ours.recv(100) == b"taken\n"
        assert ours.recv(100) == b""


@given(st.lists(st.text()))
def test_words_come_as_they_were_said_in_whatever_pieces(words: list[str]) -> None:
    ours, theirs = socket.socketpair()
    line = Starting(theirs)
    data = startline.encode(words)
    with ours:
        ours.sendall(data[:3])
        ours.sendall(data[3:])
        assert line.await_words() == words
        line.close()


def test_who_waits_hears_that_the_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    line = Starting(theirs)
    ours.close()
    with pytest.raises(EOFError):
        line.await_words()
    line.say("there")  # to nobody, which is no fault
    line.close()


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ValueError, match="command line"):
        startline.encode(["x" * startline.WORDS_BYTES_MAX])


def test_what_is_no_word_is_none() -> None:
    assert [startline.decode(line) for line in (b"there", b"loaded", b"", b"There", b"\xff")] == [
        "there",
        "loaded",
        None,
        None,
        None,
    ]
