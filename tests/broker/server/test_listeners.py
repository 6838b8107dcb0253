"""Listening sockets of the gateway, and its errors when it cannot listen."""

from __future__ import annotations

import os
import socket

import pytest

from broker.server.server import ListenError, open_listeners, url
from protocol.common.listening import LISTENER_FD, listen


def test_without_a_service_manager_it_listens_where_it_is_told() -> None:
    [listener] = open_listeners("127.0.0.1", 0, {}, os.getpid())
    with listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            open_listeners("127.0.0.1", port, {}, os.getpid())


def test_the_supervisors_socket_comes_first() -> None:
    with listen("127.0.0.1", 0) as theirs:
        environ = {LISTENER_FD: str(os.dup(theirs.fileno())), "PATH": "/bin"}
        [listener] = open_listeners("127.0.0.1", 1, environ, os.getpid())
        with listener:
            assert listener.getsockname() == theirs.getsockname()
            assert not os.get_inheritable(listener.fileno())
        assert environ == {"PATH": "/bin"}


def test_a_descriptor_that_does_not_listen_is_an_error() -> None:
    with socket.socket() as idle, pytest.raises(ListenError, match="is not a listening TCP socket"):
        open_listeners("127.0.0.1", 0, {LISTENER_FD: str(os.dup(idle.fileno()))}, os.getpid())


def test_a_word_about_sockets_that_makes_no_sense_is_an_error() -> None:
    told = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}
    with pytest.raises(ListenError, match="cannot use the sockets"):
        open_listeners("127.0.0.1", 0, told, os.getpid())
