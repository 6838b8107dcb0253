"""Kills and a restart under streams with long prompts that share prefixes: a short run of the lane."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.full_server import full_server
from tests.faults.prompt_sets import PromptTexts, Sizes, draw_bodies
from tests.faults.shared_prompts import KILLS_BETWEEN_RESTARTS, Soak, Step, draw_steps
from tests.models.fixtures import model_folder
from tests.oracle import Oracle

SEED = 5
SIZES = Sizes(prompt_max=1800, answer_max=32, requests=8)
STREAMS = 12
STEPS: tuple[Step, ...] = ("both", "restart", "worker")
BOUND_S = 100.0


@pytest.mark.timeout(600)  # several timeouts, if streams hang
def test_streams_with_shared_prefixes_survive_kills_and_a_restart(tmp_path: Path) -> None:
    model = model_folder("dense")
    with Oracle() as oracle, full_server(tmp_path, model) as server:
        soak = Soak(server, model, SIZES, SEED, streams=STREAMS, bound_s=BOUND_S)
        outcome = soak.run(STEPS, oracle, idle_s=0)
    assert outcome.hung == []
    assert outcome.wrong == []
    assert not outcome.errors
    assert outcome.log_errors == []
    assert outcome.in_flight == 0
    # Kills must hit open streams, and prefixes must be restored.
    assert outcome.kills == {"worker": 1, "both": 1}
    assert outcome.met >= STREAMS
    assert outcome.reused >= STREAMS
    assert outcome.pauses_s


def test_prompts_have_their_sizes_and_most_share_the_system_prompt() -> None:
    texts, sizes = PromptTexts(model_folder("dense")), Sizes()
    bodies = [body for _, body in draw_bodies(texts, sizes, random.Random(SEED))]
    prompts = [
        body.get("prompt") or "\n\n".join(message["content"] for message in body["messages"])
        for body in bodies
    ]
    lengths = [texts.count(prompt) for prompt in prompts]
    assert len(prompts) == sizes.requests
    assert min(lengths) >= sizes.prompt_min
    assert max(lengths) <= sizes.prompt_max
    shared = [
        prompt for prompt in prompts if texts.cut(prompt, sizes.shared) == texts.cut(prompts[0], sizes.shared)
    ]
    assert len(shared) > sizes.requests // 2
    assert len(set(prompts)) == sizes.requests


def test_steps_have_all_kinds_of_kills_and_restarts_between_them() -> None:
    steps = draw_steps(random.Random(SEED), 23)
    kills = [step for step in steps if step not in ("restart", "prompts")]
    assert len(kills) == 23
    assert set(kills) == {"worker", "spare", "both"}
    assert steps.count("restart") == 5
    assert steps.count("prompts") == 2
    assert len(KILLS_BETWEEN_RESTARTS) == 5
