"""What can be set for `roundhouse serve`, and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from deploy.supervisor.memory import fits_beside
from deploy.supervisor.models import Replicas
from deploy.supervisor.reloading import Reloading
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import STOP_TIMEOUT_S
from protocol import logs
from protocol.hosts import Backend, Mode
from protocol.parts import Share
from protocol.settings import public_name
from protocol.sizes import Size
from protocol.wire import MEDIA_FRAMES_MAX
from protocol.workersettings import WorkerSettings

PROGRAM = "roundhouse serve"
ABOUT = """Run the gateway and a worker for each model in the foreground, start again what dies, and stop all
on Ctrl-C. Of several models those run that are asked for; what else there is to say of one stands in the
file, under [models.NAME]: model, aliases, resident, and what can be set for a worker.
Every setting is also a variable (--max-running is ROUNDHOUSE_MAX_RUNNING) and a key under [serve] in the
file named by --config (max_running); a flag wins over a variable, a variable over the file."""

PORT = 8000
DRAIN_TIMEOUT_S = WorkerSettings().drain_timeout_s
"""What a worker's requests get to end, where nothing else is said."""


class ServeSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """What can be said once for the supervisor and its children. None: each child's own default."""

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="model id or folder, or NAME=… to have it called so; of several each is started when"
            " it is asked for; none: the embedded pocket model, no download"
        ),
    ] = ()
    replicas: Annotated[
        Replicas, Meta(description="workers of each model, on this machine; a model's own table wins")
    ] = 1
    host: Annotated[str | None, Meta(description="address to listen on (default: 127.0.0.1)")] = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description=f"port where clients connect (default: {PORT})"),
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="keys that clients must offer; ps shows a flag: better a file, or the variable"),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(description="file with one key on each line, then a name; read again when it changes"),
    ] = None
    insecure_no_keys: Annotated[
        bool | None, Meta(description="listen beyond this machine although there are no API keys")
    ] = None
    max_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that one API key may have in the house; beyond them 429 at once"),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="web pages that may ask from a browser, as https://host; * for all")
    ] = ()
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
    ] = None
    hosts: Annotated[
        Path | None,
        Meta(description="hostfile of the machines that run the model together, this one first"),
    ] = None
    split: Annotated[
        Mode | None,
        Meta(description="how they share it: tensor or pipeline (default: as family and backend like)"),
    ] = None
    backend: Annotated[
        Backend | None,
        Meta(description="what connects them: ring or jaccl (default: what the hostfile says, else ring)"),
    ] = None
    hosts_port: Annotated[
        Annotated[int, Meta(ge=1, le=65000)] | None,
        Meta(description="their first port, counted up from there for each (default: 32323)"),
    ] = None
    fallback: Annotated[
        tuple[str, ...],
        Meta(
            description="what takes its place, under its name, when it does not come back; if repeated, in"
            " order: MODEL (on this machine alone), MODEL@HOSTFILE, or @HOSTFILE (the same model there)"
        ),
    ] = ()
    fallback_after_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(
            description="seconds until then, each time; longer than it takes to load (default: 60, or less"
            " where there are several, so that streams are still there)"
        ),
    ] = None
    max_running: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="requests that run at once on the worker")
    ] = None
    text_only: Annotated[
        bool | None, Meta(description="of models that see, serve only the part that reads and writes")
    ] = None
    max_waiting: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="requests that may wait for the worker; beyond them 503 at once"),
    ] = None
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="tokens that prompts which wait may have together; beyond them 503 at once"
            " (default: four times what the worker's memory holds)"
        ),
    ] = None
    queue_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds after which a request that was not begun gets a 503 (default: it waits)"),
    ] = None
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(description="connections of clients; beyond them 503 at once (default: 1024)"),
    ] = None
    responses_max: Annotated[
        Annotated[int, Meta(ge=0, le=2**20)] | None,
        Meta(description="responses kept for previous_response_id, the oldest go (default: 1000; 0: none)"),
    ] = None
    allow_media_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts that images are fetched from: host, *.domain, or * for all that are public"
            " (default: none)"
        ),
    ] = ()
    image_pixels_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="pixels that an image is made no larger than (default: as its model likes)"),
    ] = None
    video_frames_max: Annotated[
        Annotated[int, Meta(ge=2, le=MEDIA_FRAMES_MAX)] | None,
        Meta(description="frames of a video that are looked at, evenly spread (default: 32)"),
    ] = None
    failover_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds that requests which lost their worker wait for it (default: 120)"),
    ] = None
    load_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds that requests wait for a model that is started for them (default: 300)"),
    ] = None
    unload_after_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(
            description="seconds without a request after which one of several models is unloaded (default: it"
            " stays until its room is needed)"
        ),
    ] = None
    memory_budget: Annotated[
        Size | None,
        Meta(description="memory for all models together (default: for one what it needs, for several 70%)"),
    ] = None
    prefix_cache_ram: Annotated[
        Size | None,
        Meta(description="memory for prefixes, to be reused (default: a part of what is left; 0: no reuse)"),
    ] = None
    prefix_cache_disk: Annotated[
        Size | None, Meta(description="disk for prefixes that outlive the worker (default: 4GiB; 0: none)")
    ] = None
    prefix_cache_dir: Annotated[
        Path | None, Meta(description="their folder (default: in the user's cache folder)")
    ] = None
    speculation: Annotated[
        Literal["auto", "off"] | None,
        Meta(
            description="draft what answers may say next, where that is quicker: auto or off (default: off;"
            " auto with a draft model)"
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Meta(
            description="folder or id of a small model with the same tokenizer, or of a drafter trained for"
            " the model, which makes drafts"
        ),
    ] = None
    sparse_prefill: Annotated[
        Share | None,
        Meta(
            description="of prompts with more than 8,192 tokens run only this share, chosen by the draft"
            " model (default: all)",
        ),
    ] = None
    image_cache: Annotated[
        Size | None,
        Meta(description="memory for encoded images (default: an eighth of what is left)"),
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(description="where gateway and worker meet, ipc:// or tcp:// (default: a socket named by port)"),
    ] = None
    join: Annotated[
        str | None,
        Meta(description="where workers of other machines connect besides, as tcp://ADDRESS:PORT"),
    ] = None
    routing: Annotated[
        Literal["affinity", "load"] | None,
        Meta(
            description="of several workers of a model, prefer one that has run a prompt's beginning"
            " (affinity, the default), or the least loaded (load)"
        ),
    ] = None
    keep_awake: Annotated[
        bool | None,
        Meta(description="keep the machine from falling asleep while requests run (default: on a Mac)"),
    ] = None
    keyless_metrics: Annotated[bool | None, Meta(description="/metrics needs no API key")] = None
    log_prompts: Annotated[
        bool | None, Meta(description="log what is asked, whole conversations, for all who read the log")
    ] = None
    inspect: Annotated[
        bool | None, Meta(description="show the last requests, whole conversations, to all who may ask")
    ] = None
    log_format: Annotated[logs.Format | None, Meta(description="text or json (default: text)")] = None
    log_level: Annotated[
        logs.Level | None, Meta(description="debug, info, warning or error (default: info)")
    ] = None
    drain_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)] | None,
        Meta(
            description="seconds that a worker's requests get to end when it is told to stop; then another"
            " one goes on with them (default: 10)"
        ),
    ] = None
    ready_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds a reloaded worker gets to become ready")
    ] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds each child gets to stop before it is killed")
    ] = STOP_TIMEOUT_S
    deaths_max: Annotated[
        int, Meta(ge=0, description="give up when more processes than this died within five minutes")
    ] = RestartLimits().deaths_max
    restart_delay_max_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="longest wait before a process that keeps dying is started again"),
    ] = RestartLimits().delay_s_max

    spare: Annotated[
        int,
        Meta(ge=0, le=1, description="processes that wait, with all imported, to become the next worker"),
    ] = 1

    def reloading(self, control: Path) -> Reloading:
        """How the worker is reloaded, by orders that come to the socket `control`."""
        drain_s = DRAIN_TIMEOUT_S if self.drain_timeout_s is None else self.drain_timeout_s
        return Reloading(control, drain_s, self.ready_timeout_s, fits_beside)

    def restart_limits(self) -> RestartLimits:
        return RestartLimits(deaths_max=self.deaths_max, delay_s_max=self.restart_delay_max_s)
