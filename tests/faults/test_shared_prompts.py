"""Kills and a restart under streams with long prompts that share prefixes: a short run of the lane."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.full_server import FullServer, full_server
from tests.faults.prompt_sets import Sizes
from tests.faults.shared_prompts import Soak, Step
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.models.fixtures import model_folder
from tests.oracle import Oracle

SEED = 5
SIZES = Sizes(prompt_max=1300, answer_max=32, requests=5)
STREAMS = 6
STEPS: tuple[Step, ...] = ("restart", "both")
BOUND_S = 100.0
QUESTION = "Count from 1 to 200."
ANSWER: dict[str, object] = {"ignore_eos": True, "max_tokens": 200, "temperature": 0}


def go_on_in_what_was_the_spare(server: FullServer) -> None:
    """Kill the worker under streams when there is a spare: they must have the text of one undisturbed."""
    spare = server.wait_spare()
    [worker] = server.status()["workers"]
    wait_for([alone := ask(server.url, QUESTION, **ANSWER)], 120)
    streams = [ask(server.url, QUESTION, **ANSWER) for _ in range(2)]
    wait_until_flowing(streams)
    os.kill(worker["pid"], signal.SIGKILL)
    wait_for(streams, 120)
    assert [stream.texts for stream in streams] == [alone.texts] * 2
    [successor] = server.status()["workers"]
    assert successor["pid"] == spare
    assert f"worker runs as pid {spare}, which was the spare" in server.log()
    assert successor["start_s"]["imports"] < worker["start_s"]["imports"]


@pytest.mark.timeout(600)  # several timeouts, if streams hang
def test_streams_with_shared_prefixes_survive_kills_and_a_restart(tmp_path: Path) -> None:
    model = model_folder("dense")
    with Oracle() as oracle, full_server(tmp_path, model) as server:
        soak = Soak(server, model, SIZES, SEED, streams=STREAMS, bound_s=BOUND_S)
        outcome = soak.run(STEPS, oracle, idle_s=0)
        go_on_in_what_was_the_spare(server)
    assert outcome.hung == []
    assert outcome.wrong == []
    assert not outcome.errors
    assert outcome.log_errors == []
    assert outcome.in_flight == 0
    # Kills must hit open streams, and prefixes must be restored.
    assert outcome.kills == {"both": 1}
    assert outcome.met >= STREAMS
    assert outcome.reused >= STREAMS
    assert outcome.pauses_s
