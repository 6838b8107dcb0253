"""`contract.Loader` for the scripted engine."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from protocol.types import Capabilities
from tests.scripted_worker.adapters import FakeAdapters
from tests.scripted_worker.engine import FakeEngine
from tests.scripted_worker.script import Script
from tests.scripted_worker.tally import TallyFile
from tests.scripted_worker.text import CONTEXT_LENGTH, FakePipeline, FakePreparer
from worker.contract.engine import InsufficientMemoryError, Model, ModelError, ModelInfo, Progress


@dataclass(slots=True)
class FakeLoader:
    """Loader of the scripted engine; takes `load_s` seconds."""

    name: str
    step_ms: float = 0.0
    load_s: float = 0.0
    images: bool = False
    broken: bool = False
    crowded: bool = False
    identity: str = ""
    videos: bool = False
    tally: Path | None = None

    def load(self, progress: Progress) -> Model:
        if self.broken:
            raise ModelError("scripted: the model cannot be loaded")
        if self.crowded:
            raise InsufficientMemoryError("scripted: not enough memory for the model")
        for tenth in range(10):
            progress(tenth * 1000, 10_000)
            time.sleep(self.load_s / 10)
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            info=ModelInfo(
                self.name,
                CONTEXT_LENGTH,
                0,
                Capabilities(images=self.images, videos=self.videos),
                identity=self.identity,
            ),
            engine=FakeEngine(scripts, self.step_ms, tally=TallyFile(self.tally)),
            open_preparer=lambda context_length: FakePreparer(scripts, context_length),
            open_output_processor=lambda request: FakePipeline(scripts.get(request.id, Script()), request.id),
            adapters=FakeAdapters(),
        )
