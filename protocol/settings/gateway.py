"""The settings of a gateway, shared with `serve`, which sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from protocol.common import logs
from protocol.common.state_folder import DEFAULT_HOST, DEFAULT_PORT, server_name
from protocol.settings.reader import DrainTimeout, Seconds, Size, public_name
from protocol.types import PrefixSharing, RoutingMethod
from protocol.wire import MEDIA_BYTES_MAX, MEDIA_FRAMES_MAX

Port = Annotated[int, Meta(ge=1, le=65535, description="port for clients")]

MEDIA_MEMORY = 512 * 2**20
JOURNAL_MAX = 2**30
BATCH_STORAGE = 4 * 2**30


class GatewaySettings(Struct, frozen=True, kw_only=True, rename=public_name, omit_defaults=True):
    """All settings of one gateway process."""

    host: Annotated[str, Meta(description="address to listen on")] = DEFAULT_HOST
    port: Port = DEFAULT_PORT
    endpoint: Annotated[
        str,
        Meta(
            description="endpoint for workers (default: a socket named after host and port in the runtime"
            " directory)"
        ),
    ] = ""
    join: Annotated[
        str,
        Meta(description="additional endpoint for workers on other machines, as tcp://ADDRESS:PORT"),
    ] = ""
    routing: Annotated[
        RoutingMethod,
        Meta(
            description="choice among a model's workers: affinity (prefer one that has a prefix of the prompt"
            " cached) or load (the least loaded one)"
        ),
    ] = "affinity"
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint that is not on loopback")
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="API keys that clients must send; ps shows flags, so prefer a file or the variable"),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(description="file of API keys, made by `roundhouse keys create`; read again when it changes"),
    ] = None
    insecure_no_keys: Annotated[
        bool, Meta(description="accept connections from other machines without API keys")
    ] = False
    max_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum requests in flight per API key; further ones get a 429"),
    ] = None
    prefix_sharing: Annotated[
        PrefixSharing,
        Meta(
            description="who shares the prefix cache: key (each API key has its own prefixes; keys of one"
            " name have them in common) or all"
        ),
    ] = "key"
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(description="origins of web pages that may call the API, as https://host; * for all"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="further names of this server that clients may use, as name, *.domain, or * for all"
            " (default: names of this machine and IP addresses; with API keys, all)"
        ),
    ] = ()
    keep_awake: Annotated[
        bool | None,
        Meta(description="keep the machine awake while requests are in flight (default: only on a Mac)"),
    ] = None
    keyless_metrics: Annotated[bool, Meta(description="serve /metrics without an API key")] = False
    log_prompts: Annotated[
        bool, Meta(description="log whole prompts; everyone who can read the log can read them")
    ] = False
    inspect: Annotated[
        bool, Meta(description="show the last requests, with whole conversations, to all clients")
    ] = False
    max_waiting: Annotated[
        int,
        Meta(ge=0, le=65536, description="maximum requests that wait for a worker; further ones get a 503"),
    ] = 64
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="maximum tokens of all waiting prompts; further requests get a 503 (default: four"
            " times what fits into the worker's memory)"
        ),
    ] = None
    queue_timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="seconds after which a request that no worker has started gets a 503 (default: no"
            " limit)"
        ),
    ] = None
    max_tokens_default: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="maximum tokens of an answer whose request sets no maximum (default: as many as the"
            " context holds)"
        ),
    ] = None
    max_connections: Annotated[
        int, Meta(ge=1, le=65536, description="maximum client connections; further ones get a 503")
    ] = 1024
    idle_timeout_s: Annotated[
        int, Meta(ge=1, le=86400, description="seconds that an idle connection is kept open")
    ] = 30
    body_timeout_s: Annotated[
        Seconds,
        Meta(description="timeout in seconds for the body of a request, and at most for its head"),
    ] = 60.0
    read_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds after which a client that does not read its response is disconnected"),
    ] = 60.0
    body_budget_bytes: Annotated[
        int,
        Meta(
            ge=1024, description="maximum bytes of all request bodies in flight; further requests get a 503"
        ),
    ] = 256 * 2**20
    body_bytes_max: Annotated[int, Meta(ge=1024, description="maximum size of a request body in bytes")] = (
        32 * 2**20
    )
    media_bytes_max: Annotated[
        int, Meta(ge=1024, le=MEDIA_BYTES_MAX, description="maximum size of an image or video file in bytes")
    ] = 16 * 2**20
    image_pixels_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="pixels to which larger images are scaled down (default: the model's)"),
    ] = None
    video_frames_max: Annotated[
        int,
        Meta(ge=2, le=MEDIA_FRAMES_MAX, description="maximum frames sampled from a video, evenly spaced"),
    ] = 32
    media_memory: Annotated[
        Size, Meta(description="memory for images and videos in flight; further requests get a 503")
    ] = MEDIA_MEMORY
    media_timeout_s: Annotated[
        Seconds, Meta(description="timeout in seconds for fetching all images of a request")
    ] = 20.0
    allow_media_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts that images may be fetched from: host, *.domain, or * for all public ones"
            " (default: none)"
        ),
    ] = ()
    responses_max: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="responses stored for previous_response_id, the oldest are evicted; 0: none",
        ),
    ] = 1000
    responses_bytes_max: Annotated[int, Meta(ge=0, description="maximum bytes of stored responses")] = (
        128 * 2**20
    )
    journal_max: Annotated[
        Size,
        Meta(
            description="disk space for stored responses and for answers that outlive the gateway; 0: they"
            " end with it"
        ),
    ] = JOURNAL_MAX
    journal_dir: Annotated[
        Path | None,
        Meta(
            description="folder for them (default: one named after host and port in the user's state folder)"
        ),
    ] = None
    reattach_window_s: Annotated[
        Seconds,
        Meta(
            description="seconds after its end, or after its last client left, for which the answer to a"
            " request with an Idempotency-Key or X-Conversation-Id can be read again"
        ),
    ] = 60.0
    batch_storage: Annotated[
        Size, Meta(description="disk space for the files and results of batches; 0: no batches")
    ] = BATCH_STORAGE
    batch_dir: Annotated[
        Path | None,
        Meta(
            description="folder for them (default: one named after host and port in the user's state folder)"
        ),
    ] = None
    batch_days: Annotated[
        int,
        Meta(ge=1, le=3650, description="days after which files, and batches that have ended, are deleted"),
    ] = 30
    keepalive_s: Annotated[
        Seconds,
        Meta(
            description="seconds without output after which a stream gets a keepalive (comment, ping or"
            " event)"
        ),
    ] = 10.0
    silent_after_s: Annotated[
        Seconds, Meta(description="seconds without a heartbeat after which a worker counts as silent")
    ] = 3.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a step, while requests run, after which a worker counts as stalled"
        ),
    ] = 120.0
    failover_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds that requests wait for another worker after theirs was lost"),
    ] = 120.0
    orphan_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds for which workers keep their requests when they lose the gateway",
        ),
    ] = 60.0
    load_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds that requests wait for a model to be loaded on demand; then 503"),
    ] = 300.0
    unload_after_s: Annotated[
        Seconds | None,
        Meta(
            description="seconds without a request after which one of several models is unloaded (default:"
            " only to make room for another one)"
        ),
    ] = None
    hung_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds after which a silent or stalled worker on this machine is killed, so that"
            " another one can replace it"
        ),
    ] = 15.0
    drain_timeout_s: DrainTimeout = 10.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"

    @property
    def server(self) -> str:
        """The name of this server's state."""
        return server_name(self.host, self.port)

    def __post_init__(self) -> None:
        if self.max_per_key is not None and not self.api_keys and self.api_keys_file is None:
            raise ValueError("max_per_key: there are no API keys; set api_keys or api_keys_file")
        if self.body_budget_bytes < self.body_bytes_max:
            raise ValueError(
                "body_budget_bytes: must be at least body_bytes_max, or the largest body would not fit"
            )
        if self.media_memory < self.media_bytes_max:
            raise ValueError(
                "media_memory: must be at least media_bytes_max, or the largest image would not fit"
            )
