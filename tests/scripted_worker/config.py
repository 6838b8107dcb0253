"""The settings of `python -m tests.scripted_worker`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.settings.reader import public_name, read
from protocol.settings.worker import WorkerSettings


class FakeSettings(WorkerSettings, frozen=True, kw_only=True, rename=public_name, omit_defaults=True):
    """Settings of a worker, and what its script does."""

    name: Annotated[str, Meta(description="the model's name, unless `served_name` is given")] = "fake"
    step_ms: Annotated[float, Meta(ge=0, description="duration of a step")] = 0.0
    load_s: Annotated[float, Meta(ge=0, description="duration of loading")] = 0.0
    images: Annotated[bool, Meta(description="support images")] = False
    videos: Annotated[bool, Meta(description="support videos")] = False
    broken: Annotated[bool, Meta(description="fail to load")] = False
    pressure_file: Annotated[str, Meta(description="read the memory pressure from a file as PSI's")] = ""
    crowded: Annotated[bool, Meta(description="fail to load for lack of memory")] = False


def scripted(flags: str) -> FakeSettings:
    """Return the settings of these flags."""
    return read(FakeSettings, "worker", flags.split(), {}, program="tests.scripted_worker", about="")
