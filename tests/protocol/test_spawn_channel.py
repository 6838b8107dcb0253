"""Spawn channel between the supervisor and a worker process."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import channel
from protocol.channel import SpawnChannel


def test_a_process_without_one_finds_none() -> None:
    assert SpawnChannel.find({}) is None
    assert SpawnChannel.find({channel.SPAWN_FD: "x"}) is None


def test_spawn_channel_is_claimed_once_and_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    environ = {channel.SPAWN_FD: str(theirs.detach()), "OTHER": "1"}
    with ours:
        os.set_inheritable(int(environ[channel.SPAWN_FD]), True)
        line = SpawnChannel.find(environ)
        assert line is not None
        assert environ == {"OTHER": "1"}
        line.send("there")
        assert ours.recv(100) == b"there\n"
        line.hand_on(environ)
        assert not os.get_inheritable(int(environ[channel.SPAWN_FD]))
        again = SpawnChannel.find(environ)
        assert again is not None
        again.send("taken")
        again.close()
        assert ours.recv(100) == b"taken\n"
        assert ours.recv(100) == b""


@given(st.lists(st.text()))
def test_words_come_as_they_were_said_in_whatever_pieces(words: list[str]) -> None:
    ours, theirs = socket.socketpair()
    line = SpawnChannel(theirs)
    data = channel.encode_words(words)
    with ours:
        ours.sendall(data[:3])
        ours.sendall(data[3:])
        assert line.read_assignment() == words
        line.close()


def test_waiting_spare_gets_eof_when_the_supervisor_exits() -> None:
    ours, theirs = socket.socketpair()
    line = SpawnChannel(theirs)
    ours.close()
    with pytest.raises(EOFError):
        line.read_assignment()
    line.send("there")  # the other end is closed, which is not an error
    line.close()


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ValueError, match="command line"):
        channel.encode_words(["x" * channel.WORDS_BYTES_MAX])


def test_unknown_message_decodes_to_none() -> None:
    assert [channel.decode_word(line) for line in (b"there", b"loaded", b"", b"There", b"\xff")] == [
        "there",
        "loaded",
        None,
        None,
        None,
    ]
