"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from broker.dispatch.routing import Method
from protocol import logs
from protocol.settings import public_name
from protocol.sizes import Size
from protocol.wire import MEDIA_BYTES_MAX, MEDIA_FRAMES_MAX, MEDIA_PIXELS_MAX

Port = Annotated[int, Meta(ge=1, le=65535, description="where clients connect")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]

MEDIA_MEMORY = 512 * 2**20


class GatewaySettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Everything about one gateway process that can be set."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Port = 8000
    endpoint: Annotated[
        str,
        Meta(
            description="where workers connect; empty: a socket named after the port in the runtime directory"
        ),
    ] = ""
    join: Annotated[
        str,
        Meta(
            description="where workers of other machines connect besides, as tcp://HOST:PORT; empty: nowhere"
        ),
    ] = ""
    routing: Annotated[
        Method,
        Meta(
            description="affinity: of several workers of a model one that has run a prompt's beginning is"
            " preferred; load: the least loaded"
        ),
    ] = "affinity"
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
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
        bool, Meta(description="listen beyond this machine although there are no API keys")
    ] = False
    max_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that one API key may have in the house; beyond them 429 at once"),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="web pages that may ask from a browser, as https://host; * for all")
    ] = ()
    keep_awake: Annotated[
        bool | None,
        Meta(description="keep the machine from falling asleep while requests run; none: if it is a Mac"),
    ] = None
    keyless_metrics: Annotated[bool, Meta(description="/metrics needs no API key")] = False
    log_prompts: Annotated[
        bool, Meta(description="log what is asked, whole conversations, for all who can read the log")
    ] = False
    inspect: Annotated[
        bool, Meta(description="show the last requests, whole conversations, to all who may ask")
    ] = False
    max_waiting: Annotated[
        int, Meta(ge=0, le=65536, description="requests that may wait for a worker; beyond them 503 at once")
    ] = 64
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="tokens that prompts which wait may have together; beyond them 503 at once; none:"
            " four times what the worker's memory holds"
        ),
    ] = None
    queue_timeout_s: Annotated[
        Seconds | None,
        Meta(description="seconds after which a request that no worker has begun gets a 503; none: it waits"),
    ] = None
    max_connections: Annotated[
        int, Meta(ge=1, le=65536, description="connections of clients; beyond them 503 at once")
    ] = 1024
    idle_timeout_s: Annotated[
        int, Meta(ge=1, le=86400, description="seconds a connection is kept open for a next request")
    ] = 30
    body_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds in which the body of a request must arrive, and its head at the latest"),
    ] = 60.0
    read_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds after which a client that does not read its answer is disconnected"),
    ] = 60.0
    body_budget_bytes: Annotated[
        int, Meta(ge=1024, description="bytes of request bodies in the house; beyond them 503 at once")
    ] = 256 * 2**20
    body_bytes_max: Annotated[int, Meta(ge=1024, description="largest request body, in bytes")] = 32 * 2**20
    media_bytes_max: Annotated[
        int, Meta(ge=1024, le=MEDIA_BYTES_MAX, description="largest image, or file of a video, in bytes")
    ] = 16 * 2**20
    media_pixels_max: Annotated[
        int,
        Meta(
            ge=1,
            le=MEDIA_PIXELS_MAX,
            description="largest image, in pixels; a larger one is refused before it is decoded",
        ),
    ] = MEDIA_PIXELS_MAX
    image_pixels_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="pixels that an image is made no larger than; none: as its model likes"),
    ] = None
    video_frames_max: Annotated[
        int,
        Meta(ge=2, le=MEDIA_FRAMES_MAX, description="frames of a video that are looked at, evenly spread"),
    ] = 32
    media_memory: Annotated[
        Size, Meta(description="images and videos of requests in the house; beyond them 503 at once")
    ] = MEDIA_MEMORY
    media_timeout_s: Annotated[
        Seconds, Meta(description="seconds in which all images of a request must be fetched")
    ] = 20.0
    allow_media_hosts: Annotated[
        tuple[str, ...],
        Meta(description="hosts that images are fetched from: host, *.domain, or * for all that are public"),
    ] = ()
    responses_max: Annotated[
        int,
        Meta(ge=0, le=2**20, description="responses kept for previous_response_id, the oldest go; 0: none"),
    ] = 1000
    responses_bytes_max: Annotated[
        int, Meta(ge=0, description="bytes that they take in the gateway's memory at the most")
    ] = 128 * 2**20
    keepalive_s: Annotated[
        Seconds, Meta(description="seconds of silence after which a stream gets a comment, or a ping")
    ] = 10.0
    silent_after_s: Annotated[
        Seconds, Meta(description="seconds without a heartbeat after which a worker counts as silent")
    ] = 3.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds without a step, while rows run, after which a worker counts as stalled"),
    ] = 120.0
    failover_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds that requests which lost their worker wait for another to get to work"),
    ] = 120.0
    load_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds that requests wait for a model that is loaded because of them; then 503"),
    ] = 300.0
    unload_after_s: Annotated[
        Seconds | None,
        Meta(
            description="seconds without a request after which one of several models is unloaded; none: only"
            " to make room for another"
        ),
    ] = None
    hung_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds after which a silent or stalled worker of this machine is killed, so that"
            " another one can take its place"
        ),
    ] = 15.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="seconds open streams get when the gateway stops")
    ] = 5.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"

    def __post_init__(self) -> None:
        if self.max_per_key is not None and not self.api_keys and self.api_keys_file is None:
            raise ValueError("max_per_key: there are no API keys to count by")
        if self.body_budget_bytes < self.body_bytes_max:
            raise ValueError("body_budget_bytes: is below body_bytes_max, so the largest body finds no room")
        if self.media_memory < self.media_bytes_max:
            raise ValueError("media_memory: is below media_bytes_max, so the largest image finds no room")
