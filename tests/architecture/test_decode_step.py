"""The modules whose code runs in a plain decode step: whoever reads the step must open them all."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest

import worker
from protocol.messages import Finished, Message, StepOutputs
from protocol.settings.worker import WorkerSettings
from tests.factories import engine_request
from tests.models.fixtures import model_folder
from tests.system import eventually
from worker.core.commands import Submit
from worker.gateway.model_thread import ModelThread
from worker.gateway.outbox import Outbox
from worker.load.load import ModelLoader

WORKER = f"{Path(worker.__file__).parent}/"
TOKENS = 24
WAIT_S = 240
"""Maximum duration in seconds: a load beside other tests, with all of its probes, is long."""
SKIPPED_STEPS = 8
"""Steps that are not measured: the first ones, with the rows' prompts."""
MODULES_MAX = 19
"""Lower it when there are fewer modules; a new mechanism must not raise it."""


class ProfiledOutbox(Outbox):
    """Outbox that profiles the model's loop, which fills it, from one step's message to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[set[str]] = []
        """The modules of each step."""

    def put(self, message: Message) -> None:
        if isinstance(message, StepOutputs):
            self.steps.append(modules := set())
            sys.setprofile(functools.partial(_note, modules))
        elif isinstance(message, Finished):
            sys.setprofile(None)


def _note(modules: set[str], frame: FrameType, event: str, argument: object) -> None:
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(WORKER):
        modules.add(path.removeprefix(WORKER))


def profiled_steps(rows: int, folder: Path) -> Sequence[set[str]]:
    """Return the modules of each step in which `rows` greedy rows of different lengths decode."""
    settings = WorkerSettings(model=str(model_folder("dense")), prefix_cache_dir=folder)
    with closing(ProfiledOutbox()) as outbox:
        thread = ModelThread(ModelLoader(str(settings.model)), settings, "w", outbox)
        for row in range(rows):
            prompt = range(row, 40 + 30 * row)
            thread.inbox.put(Submit(engine_request(str(row), prompt, max_tokens=TOKENS)))
        thread.start()
        eventually(lambda: len(outbox.steps) >= TOKENS or thread.failure, within_s=WAIT_S, what="rows decode")
        thread.stop()
        thread.join(30)
        assert thread.failure is None
        assert thread.pool is not None
        thread.pool.close()
    return outbox.steps[SKIPPED_STEPS : TOKENS - 1]


@pytest.mark.parametrize("rows", [1, 4])
def test_plain_decode_step_touches_few_modules(rows: int, tmp_path: Path) -> None:
    steps = profiled_steps(rows, tmp_path)
    assert len(steps) > 8
    # What runs only now and then, such as reports by the clock, is not part of the step.
    modules = set.intersection(*steps)
    assert "core/engine_core.py" in modules
    assert len(modules) <= MODULES_MAX, sorted(modules)
