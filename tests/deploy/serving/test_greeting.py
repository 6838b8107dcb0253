"""What is said once somebody can be asked."""

from __future__ import annotations

import json
import logging
import shlex

import pytest

from deploy.serving.greeting import Greeting, words
from tests.deploy.agents.endpoints import endpoint_that_answers
from tests.ports import free_port
from tests.system import eventually

WAIT_S = 20.0


@pytest.mark.parametrize("needs_key", [False, True])
def test_what_is_to_be_pasted_is_a_whole_command(needs_key: bool) -> None:
    command = shlex.split(words("http://127.0.0.1:8000", needs_key).partition("try: ")[2])
    assert command[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(command[-1])["messages"][0]["role"] == "user"
    assert ("authorization: Bearer YOUR-KEY" in command) == needs_key


def test_it_is_said_once_when_somebody_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with endpoint_that_answers({"/ready": (200, b"{}")}) as served, Greeting(served.url, False):
        eventually(lambda: caplog.records, within_s=WAIT_S)
    assert len(caplog.records) == 1


def test_nothing_is_said_while_nobody_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with endpoint_that_answers({"/ready": (503, b"{}")}) as served, Greeting(served.url, False):
        eventually(lambda: served.asked, within_s=WAIT_S)
    with Greeting(f"http://127.0.0.1:{free_port()}", False):
        pass
    assert not caplog.records
