"""The settings of `python -m worker.fake`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from protocol import logs
from protocol.settings import public_name
from protocol.workersettings import Bytes


class FakeSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Everything about one scripted worker that can be set."""

    endpoint: Annotated[str, Meta(description="where the gateway is")]
    name: Annotated[str, Meta(description="the model's name")] = "fake"
    served_name: Annotated[str, Meta(description="another one, as a supervisor gives it")] = ""
    model: Annotated[str, Meta(description="which model it is: what another began, it does not finish")] = ""
    curve_keys: Annotated[Path | None, Meta(description="folder with CURVE keys")] = None
    max_running: Annotated[int, Meta(ge=1, description="rows")] = 16
    cache_limit_bytes: Annotated[Bytes | None, Meta(description="bytes for caches")] = None
    step_ms: Annotated[float, Meta(ge=0, description="how long a step takes")] = 0.0
    load_s: Annotated[float, Meta(ge=0, description="how long loading takes")] = 0.0
    stall_timeout_s: Annotated[float, Meta(gt=0, description="seconds without a step")] = 120.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="seconds that rows get to end")] = 10.0
    images: Annotated[bool, Meta(description="takes images")] = False
    videos: Annotated[bool, Meta(description="takes videos")] = False
    broken: Annotated[bool, Meta(description="cannot be loaded")] = False
    crowded: Annotated[bool, Meta(description="does not fit into memory now")] = False
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"
