"""`contract.Loader` for the scripted engine."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from protocol.parts import Capabilities
from worker.contract import Facts, Model, ModelError, NoRoomError, Progress
from worker.fake.engine import FakeEngine
from worker.fake.script import Script
from worker.fake.text import CONTEXT_LENGTH, FakePipeline, FakePreparer


@dataclass(slots=True)
class FakeLoader:
    """Loads nothing, in `load_s` seconds."""

    name: str
    step_ms: float = 0.0
    load_s: float = 0.0
    images: bool = False
    broken: bool = False
    crowded: bool = False
    identity: str = ""
    videos: bool = False

    def load(self, progress: Progress) -> Model:
        if self.broken:
            raise ModelError("scripted: the model cannot be loaded")
        if self.crowded:
            raise NoRoomError("scripted: there is no room for the model")
        for tenth in range(10):
            progress(tenth * 1000, 10_000)
            time.sleep(self.load_s / 10)
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            facts=Facts(
                self.name,
                CONTEXT_LENGTH,
                0,
                Capabilities(images=self.images, videos=self.videos),
                identity=self.identity,
            ),
            engine=FakeEngine(scripts, self.step_ms),
            open_preparer=lambda context_length: FakePreparer(scripts, context_length),
            open_pipeline=lambda request: FakePipeline(scripts.get(request.id, Script()), request.id),
        )
