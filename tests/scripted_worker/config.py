"""The settings of `python -m tests.scripted_worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from protocol.common import logs
from protocol.settings.reader import public_name
from protocol.settings.worker import Bytes


class FakeSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    endpoint: Annotated[str, Meta(description="endpoint of the gateway")] = ""
    name: Annotated[str, Meta(description="the model's name")] = "fake"
    served_name: Annotated[str, Meta(description="the name given by a supervisor, instead of --name")] = ""
    model: Annotated[str, Meta(description="identity: others' output is not continued")] = ""
    curve_keys: Annotated[Path | None, Meta(description="folder with CURVE keys")] = None
    max_running: Annotated[int, Meta(ge=1, description="maximum rows")] = 16
    cache_limit_bytes: Annotated[Bytes | None, Meta(description="maximum bytes of caches")] = None
    step_ms: Annotated[float, Meta(ge=0, description="duration of a step")] = 0.0
    load_s: Annotated[float, Meta(ge=0, description="duration of loading")] = 0.0
    stall_timeout_s: Annotated[float, Meta(gt=0, description="maximum seconds without a step")] = 120.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="seconds that rows may continue")] = 10.0
    images: Annotated[bool, Meta(description="support images")] = False
    videos: Annotated[bool, Meta(description="support videos")] = False
    broken: Annotated[bool, Meta(description="fail to load")] = False
    crowded: Annotated[bool, Meta(description="fail to load for lack of memory")] = False
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"
