"""The settings of a worker, shared with `serve`, which sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.adapters import SETTING, problem_with
from protocol.common import logs
from protocol.hosts import Backend, Mode
from protocol.settings.parsers import CallParser, ReasoningParser
from protocol.settings.reader import DrainTimeout, Seconds, Size, public_name
from protocol.tasks import Task
from protocol.types import Share, Wired

Bytes = Annotated[int, Meta(ge=1)]


class WorkerSettings(Struct, frozen=True, kw_only=True, rename=public_name, omit_defaults=True):
    """Settings of one worker process."""

    model: Annotated[
        str | None,
        Meta(description="model folder or Hugging Face id (default: the embedded pocket model)"),
    ] = None
    served_name: Annotated[
        str | None,
        Meta(description="model name in the API (default: the Hugging Face id, or the folder's own name)"),
    ] = None
    task: Annotated[
        Task | None,
        Meta(description="generate, embed or rerank (default: detected from the model's files or name)"),
    ] = None
    text_only: Annotated[
        bool, Meta(description="load only the text part of a vision-language model, without image input")
    ] = False
    tool_call_parser: Annotated[
        CallParser | None,
        Meta(description="format of the model's tool calls, by vLLM's name (default: recognized)"),
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None,
        Meta(description="format of the model's reasoning, by vLLM's name (default: recognized)"),
    ] = None
    endpoint: Annotated[
        str, Meta(description="endpoint of the gateway (default: the socket of a gateway at 127.0.0.1:8000)")
    ] = ""
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint that is not on loopback")
    ] = None
    max_running: Annotated[
        int, Meta(ge=1, le=4096, description="maximum requests in a worker's decode batch; further ones wait")
    ] = 16
    inter_token_target_s: Annotated[
        Seconds,
        Meta(
            description="target for the seconds between a stream's tokens while other prompts are prefilled;"
            " four decode steps, if these take longer"
        ),
    ] = 0.1
    inter_token_max_s: Annotated[
        Seconds,
        Meta(
            description="maximum seconds between a stream's tokens where four decode steps exceed the target,"
            " and beside prompts that came with it; two decode steps, if these take longer"
        ),
    ] = 1.0
    prefill_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="maximum prompt tokens prefilled between two decode steps")
    ] = 2048
    admission_window_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="seconds that an idle worker waits for more requests to batch with a first",
        ),
    ] = 0.005
    cache_limit_bytes: Annotated[
        Bytes | None, Meta(description="maximum bytes of all KV caches (default: the available memory)")
    ] = None
    memory_limit_bytes: Annotated[
        Bytes | None,
        Meta(description="total memory in bytes for weights, caches and headroom (default: the machine's)"),
    ] = None
    memory_budget: Annotated[
        Size | None,
        Meta(
            description="maximum memory of the worker, when several models share the machine (default: no"
            " limit)"
        ),
    ] = None
    memory_headroom: Annotated[
        float, Meta(ge=0, lt=1, description="fraction of the memory that weights and caches leave free")
    ] = 0.1
    wired: Annotated[
        Wired,
        Meta(
            description="memory that macOS may not page out: weights, none, or all that the GPU may use, with"
            " which kernel panics were reported"
        ),
    ] = "weights"
    speculation: Annotated[
        Literal["auto", "off"] | None,
        Meta(
            description="speculative decoding: auto (whenever it is faster) or off (default: auto with a"
            " draft model or multi-token-prediction layers, else off)"
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Meta(
            description="folder or Hugging Face id of a draft model with the same tokenizer, or of"
            " multi-token-prediction layers of the model"
        ),
    ] = None
    experts_memory: Annotated[
        Size | None,
        Meta(
            description="memory for the experts of a mixture; the others are read from disk when needed"
            " (default: all are in memory)"
        ),
    ] = None
    exact: Annotated[
        bool,
        Meta(
            description="batch only as far as `roundhouse doctor --model` has measured the results to equal"
            " those of one row, bit by bit; may be slower"
        ),
    ] = False
    adapters: Annotated[
        tuple[Annotated[str, Meta(pattern=SETTING)], ...],
        Meta(
            description="NAME=FOLDER of a LoRA or DoRA adapter (mlx-lm's or PEFT's), served as MODEL:NAME;"
            " may be repeated"
        ),
    ] = ()
    adapter_memory: Annotated[
        Size,
        Meta(
            description="memory for adapters, taken from the caches'; adapters that are named at the start"
            " take what they need"
        ),
    ] = 0
    kv_bits: Annotated[
        Literal[4, 8] | None,
        Meta(
            description="quantize KV caches to 4 or 8 bits per value: more tokens fit, and answers change"
            " slightly (default: exact caches)"
        ),
    ] = None
    kv_group_size: Annotated[
        Literal[32, 64, 128], Meta(description="values that share a scale in quantized KV caches")
    ] = 64
    sparse_prefill: Annotated[
        Share | None,
        Meta(
            description="fraction to prefill of prompts with more than 8,192 tokens, chosen by the draft"
            " model (default: everything)",
        ),
    ] = None
    prefix_cache_ram: Annotated[
        Size | None,
        Meta(description="memory for the prefix cache; 0: no prefix cache (default: what requests leave)"),
    ] = None
    prefix_cache_disk: Annotated[
        Size, Meta(description="disk space for the prefix cache, which survives restarts; 0: none")
    ] = 4 * 2**30
    prefix_cache_disk_share: Annotated[
        Share,
        Meta(
            description="fraction of the disk's free space, with what it has, that the prefix cache may"
            " take; when others fill the disk, it gives way"
        ),
    ] = 0.25
    prefix_cache_writes: Annotated[
        Size | None,
        Meta(
            description="bytes that the prefix cache may write to the disk a day, for all models together;"
            " 0: it is only read (default: 5% of the disk's size)"
        ),
    ] = None
    prefix_cache_dir: Annotated[
        Path | None,
        Meta(
            description="folder of the prefix cache on disk (default: `prefixes` in the user's cache folder)"
        ),
    ] = None
    image_cache: Annotated[
        Size | None,
        Meta(
            description="memory for encoded images, taken from the caches' memory (default: an eighth of it)"
        ),
    ] = None
    hosts: Annotated[
        Path | None,
        Meta(description="hostfile of the machines that run the model together, this one first"),
    ] = None
    split: Annotated[
        Mode | None,
        Meta(
            description="sharding across machines: tensor or pipeline (default: chosen by family and backend)"
        ),
    ] = None
    backend: Annotated[
        Backend | None,
        Meta(description="communication backend: ring or jaccl (default: the hostfile's, else ring)"),
    ] = None
    hosts_port: Annotated[
        int, Meta(ge=1, le=65000, description="first port of the ranks; each address uses the next one")
    ] = 32323
    join_timeout_s: Annotated[Seconds, Meta(description="timeout in seconds for all ranks to connect")] = 90.0
    stands_in: Annotated[
        bool, Meta(description="fallback: continue requests that another model began under the same name")
    ] = False
    stall_timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="seconds without a step, with running requests, after which the worker exits"
            " (default: 120, and 20 when several machines run the model)"
        ),
    ] = None
    drain_timeout_s: DrainTimeout = 10.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"

    def __post_init__(self) -> None:
        if (problem := problem_with(self.adapters)) is not None:
            raise ValueError(problem)
