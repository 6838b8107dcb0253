"""`Loader` for the scripted engine."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from protocol.types import Capabilities
from tests.scripted_worker.adapters import FakeAdapters
from tests.scripted_worker.config import FakeSettings
from tests.scripted_worker.engine import FakeEngine
from tests.scripted_worker.script import Script
from tests.scripted_worker.text import CONTEXT_LENGTH, FakePipeline, FakePreparer
from worker.interfaces import InsufficientMemoryError, Model, ModelError, Progress
from worker.values import ModelInfo


@dataclass(slots=True)
class FakeLoader:
    name: str
    settings: FakeSettings = field(default_factory=FakeSettings)

    def load(self, progress: Progress) -> Model:
        told = self.settings
        if told.broken:
            raise ModelError("scripted: the model cannot be loaded")
        if told.crowded:
            raise InsufficientMemoryError("scripted: not enough memory for the model")
        for tenth in range(10):
            progress(tenth * 1000, 10_000)
            time.sleep(told.load_s / 10)
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            info=ModelInfo(
                self.name,
                CONTEXT_LENGTH,
                0,
                Capabilities(images=told.images, videos=told.videos),
                identity=told.model or "",
            ),
            engine=FakeEngine(scripts, told.step_ms),
            open_preparer=lambda context_length: FakePreparer(scripts, context_length),
            open_output_processor=lambda request: FakePipeline(scripts.get(request.id, Script()), request.id),
            adapters=FakeAdapters(),
        )
