"""The settings of a worker: it reads them, and who starts it knows beforehand which there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol import logs
from protocol.hosts import Backend, Mode
from protocol.parts import Share
from protocol.settings import public_name
from protocol.sizes import Size
from protocol.tasks import Task

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Bytes = Annotated[int, Meta(ge=1)]


class WorkerSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Everything about one worker process that can be set."""

    model: Annotated[
        str | None, Meta(description="folder or Hugging Face id; none, or empty: the embedded pocket model")
    ] = None
    served_name: Annotated[
        str | None, Meta(description="what clients call the model; none: its id, or the name of its folder")
    ] = None
    task: Annotated[
        Task | None,
        Meta(description="generate, embed or rerank; none: what the model's files or its name say"),
    ] = None
    text_only: Annotated[
        bool, Meta(description="of a model that sees, load and serve only the part that reads and writes")
    ] = False
    endpoint: Annotated[
        str, Meta(description="where the gateway is; empty: the socket of a gateway on port 8000")
    ] = ""
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
    ] = None
    max_running: Annotated[
        int, Meta(ge=1, le=4096, description="requests that decode together; more wait their turn")
    ] = 16
    inter_token_target_s: Annotated[
        Seconds, Meta(description="seconds between two tokens of a stream that prompts of others may cause")
    ] = 0.1
    prefill_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="prompt tokens run between two decode steps at the most")
    ] = 2048
    admission_window_s: Annotated[
        float,
        Meta(
            ge=0, le=1, description="seconds an idle worker that gets a request waits for others to join it"
        ),
    ] = 0.005
    cache_limit_bytes: Annotated[
        Bytes | None, Meta(description="bytes for the caches of all requests; none: what the machine has")
    ] = None
    memory_limit_bytes: Annotated[
        Bytes | None, Meta(description="bytes for weights, caches and headroom; none: what the machine has")
    ] = None
    memory_budget: Annotated[
        Size | None,
        Meta(description="bytes it may take at the most, however much there is: other models have a share"),
    ] = None
    memory_headroom: Annotated[
        float, Meta(ge=0, lt=1, description="the share of memory that weights and caches leave free")
    ] = 0.1
    speculation: Annotated[
        Literal["auto", "off"] | None,
        Meta(
            description="auto: what answers may say next is drafted, where that is quicker; off: never; none:"
            " auto with a draft model, else off"
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
            description="of prompts with more than 8,192 tokens only this share is run, chosen by the draft"
            " model; none: all of it",
        ),
    ] = None
    prefix_cache_ram: Annotated[
        Size | None,
        Meta(description="memory for prefixes, to be reused; 0: no reuse; none: a part of what is left"),
    ] = None
    prefix_cache_disk: Annotated[
        Size, Meta(description="disk for prefixes that outlive the worker; 0: none")
    ] = 4 * 2**30
    prefix_cache_dir: Annotated[
        Path | None, Meta(description="their folder; none: `prefixes` in the user's cache folder")
    ] = None
    image_cache: Annotated[
        Size | None,
        Meta(description="memory for encoded images, of that for caches; none: an eighth of it"),
    ] = None
    hosts: Annotated[
        Path | None,
        Meta(description="hostfile of the machines that run the model together, this one first; none: alone"),
    ] = None
    split: Annotated[
        Mode | None,
        Meta(description="how they share it: tensor or pipeline; none: what its family and the backend like"),
    ] = None
    backend: Annotated[
        Backend | None,
        Meta(description="what connects them: ring or jaccl; none: what the hostfile says, else ring"),
    ] = None
    hosts_port: Annotated[
        int, Meta(ge=1, le=65000, description="their first port, counted up from there for each")
    ] = 32323
    join_timeout_s: Annotated[Seconds, Meta(description="seconds within which all of them must be there")] = (
        90.0
    )
    stands_in: Annotated[
        bool, Meta(description="in place of another: go on with what that one began under the same name")
    ] = False
    stall_timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="seconds without a step, while rows run, after which the worker ends itself"
            " (default: 120, and 20 where several machines run the model)"
        ),
    ] = None
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="seconds that requests get to end when the worker is told to stop"),
    ] = 10.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"
