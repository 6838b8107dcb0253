"""Settings of `roundhouse serve` itself, and its flags, which include some of its children's settings.

Those of the children are declared in `protocol.settings.gateway` and `protocol.settings.worker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from deploy.supervisor.child import Replicas
from deploy.supervisor.children import STOP_TIMEOUT_S
from deploy.supervisor.restarts import RestartLimits
from protocol.common import logs
from protocol.common.cache_folder import xdg_folder
from protocol.settings import reader
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import Flag, Size, public_name
from protocol.settings.worker import WorkerSettings

PROGRAM = "roundhouse serve"
ABOUT = """Run the gateway and a worker for each model in the foreground, restart them when they die, and
stop all on Ctrl-C. Several models are loaded on demand. Settings of one model are in the file, under
[models.NAME]: model, aliases, resident, and every setting of a worker.
Every setting is also a variable (--max-running is ROUNDHOUSE_MAX_RUNNING) and a key under [serve] in the
file named by --config (max_running). A flag overrides a variable, a variable overrides the file."""

GATEWAY = GatewaySettings()
"""Defaults of the gateway."""
GROUPS = {
    "Models": (
        "model config replicas memory_budget wired max_running text_only tool_call_parser reasoning_parser "
        "exact experts_memory"
    ),
    "Address": "host port cors_origins allowed_hosts max_connections",
    "API keys": "api_keys_file api_keys insecure_no_keys max_per_key prefix_sharing",
    "Queue and limits": (
        "max_waiting max_waiting_tokens max_tokens_default queue_timeout load_timeout unload_after"
    ),
    "Adapters": "adapters adapter_memory",
    "Quantized KV caches": "kv_bits kv_group_size",
    "Prefix cache": (
        "prefix_cache_ram prefix_cache_disk prefix_cache_disk_share prefix_cache_writes prefix_cache_dir"
    ),
    "Speculative decoding and sparse prefill": "speculation draft_model sparse_prefill",
    "Images, videos and stored responses": (
        "allow_media_hosts image_pixels_max video_frames_max image_cache responses_max"
    ),
    "Logs and monitoring": "verbose log_format log_level log_prompts inspect keyless_metrics",
    "Restarts and failover": (
        "fallback fallback_after failover_timeout reattach_window journal_max journal_dir drain_timeout "
        "ready_timeout stop_timeout deaths_max restart_delay_max spare keep_awake"
    ),
    "Several machines": "hosts split backend hosts_port join curve_keys endpoint routing",
}
"""The settings of all processes that `serve` shows as its flags, in the order of its help."""
SHOWN = [name for names in GROUPS.values() for name in names.split()]


def default_keys_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file of API keys in the user's configuration folder; None: there is no such folder.

    `roundhouse keys` writes it, and `serve` reads it if it exists, unless settings name other keys or none.
    """
    if not (environ.get("HOME") or environ.get("XDG_CONFIG_HOME")):
        return None
    return xdg_folder(environ, "XDG_CONFIG_HOME", ".config") / "api-keys"


class ServeSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Settings of the supervisor. Fields without a description are settings of its children that it reads
    too; None: not given."""

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="model id or folder, or NAME=… to name it; several models are loaded on demand"
            " (default: the embedded pocket model, without a download)"
        ),
    ] = ()
    replicas: Annotated[
        Replicas, Meta(description="workers of each model on this machine; a model's own table overrides it")
    ] = 1
    fallback: Annotated[
        tuple[str, ...],
        Meta(
            description="replacement under the model's name when it stays down; may be repeated, used in"
            " order: MODEL (on this machine only), MODEL@HOSTFILE, or @HOSTFILE (the same model there)"
        ),
    ] = ()
    fallback_after_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(
            description="seconds that a model may be down before its next fallback takes over; must exceed"
            " its loading time (default: 60, or less with several fallbacks, so that streams survive)"
        ),
    ] = None
    memory_budget: Annotated[
        Size | None,
        Meta(
            description="memory for all models together (default: 70% of the machine's; one model: no limit)"
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(
            description="endpoint of the gateway for workers, ipc:// or tcp:// (default: a socket named after"
            " host and port)"
        ),
    ] = None
    verbose: Annotated[
        bool, Meta(description="show routine log lines on a terminal too, as they are written elsewhere")
    ] = False
    log_format: logs.Format | None = None
    log_level: logs.Level | None = None
    ready_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds that a reloaded worker has to become ready")
    ] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds that each process has to stop before it is killed")
    ] = STOP_TIMEOUT_S
    deaths_max: Annotated[
        int, Meta(ge=0, description="give up after more than this many process deaths within five minutes")
    ] = RestartLimits().deaths_max
    restart_delay_max_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="maximum delay before a process that keeps dying is restarted"),
    ] = RestartLimits().delay_s_max
    spare: Annotated[
        int,
        Meta(ge=0, le=1, description="idle processes, with all modules imported, for the next worker"),
    ] = 1

    def restart_limits(self) -> RestartLimits:
        return RestartLimits(deaths_max=self.deaths_max, delay_s_max=self.restart_delay_max_s)


def shown_flags() -> list[Flag]:
    """Return the flags of `serve`. A setting of several processes is described by the last that does."""
    kinds = (GatewaySettings, WorkerSettings, ServeSettings)
    flags = [flag for kind in kinds for flag in reader.flags(kind)]
    found = {flag.field: flag for flag in flags if flag.help and flag.field in SHOWN}
    return [found[name] for name in SHOWN if name != "config"]
