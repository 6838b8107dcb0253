"""Types of message fields: bounded numbers and names, and the structs nested in messages.

As in messages, new fields have defaults and unknown fields are ignored. Only messages are tagged: a nested
struct's type follows from its field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Neither infinite nor NaN, which JSON cannot represent."""
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Id = Annotated[str, Meta(max_length=256)]
"""Id of a request or an incarnation."""
Name = Annotated[str, Meta(max_length=1024)]
RoutingMethod = Literal["affinity", "load"]
PrefixSharing = Literal["key", "all"]
Wired = Literal["weights", "none", "all"]
"""What macOS may not page out: the weights, nothing, or as much as the GPU may use."""
Bytes = bytes
"""Alias of `bytes` for classes with a field named `bytes`."""
BACKGROUND_PRIORITY = 2**20
"""What a response in the background adds to its priority: the smallest is served first."""
BATCH_PRIORITY = 2**31
"""Priority of a batch's requests. Clients cannot set it: these rows are preempted first."""


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. `None`: the default of the model's generation_config.

    The gateway always sets `seed`, so that a resend to another worker has the same result: the random number
    for a position depends only on the seed and that position.
    """

    seed: Seed
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: Count | None = None
    """Number of top tokens reported with each sampled token's logprob; None: no logprobs."""


class Media(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image or a video of a request, in the order of the placeholders.

    Its bytes are the wire frame with index `frame`; a video given as images has `frames` wire frames from
    there on. `mime`: type detected from the bytes, `video/…` for a video file. `sha256`: hexadecimal hash of
    all frames in order. The image is scaled down to `pixels_max` pixels; None: the model's default. `param`:
    its place in the client's request, for error messages."""

    frame: Count
    frames: Count = 1
    mime: str
    sha256: str
    pixels_max: Count | None = None
    param: str = ""


class TokenLogprob(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Logprob (natural) and bytes of a token; `top`: the most likely tokens at its position."""

    bytes: Bytes
    logprob: float
    top: list[tuple[Bytes, float]] = []


class PromptToken(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Logprob and bytes of a prompt token, as in `TokenLogprob`. The first token's `logprob` is None."""

    bytes: Bytes
    logprob: float | None = None
    top: list[tuple[Bytes, float]] = []


class StructuredOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured-output constraint on the content. `kind` is the type of `text`: `json_schema`, `regex`,
    `lark` (a grammar), `choice` (a JSON array of strings), or `json_object` (empty `text`). `param`: the
    client's parameter name, for error messages. `strict`: a schema that cannot be enforced is refused; if
    false, it is enforced as far as possible."""

    kind: Name
    text: str = ""
    param: Name = ""
    strict: bool = True


class ToolCallConstraint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tool-call constraint. `required`: the output is tool calls only; `name`: of this tool. `single`: the
    output ends after its first call. `strict`: tools whose arguments must match their schema; in required
    calls the arguments of every tool must."""

    required: bool = False
    name: Name = ""
    single: bool = False
    strict: list[Name] = []


class TokenizeOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a tokenize-only request: return token ids (`tokens`) and each token's text (`pieces`) beside
    their number. `special`: add the tokenizer's special tokens; None: as for generation. `opens_turn`: add
    the generation prompt to a conversation."""

    tokens: bool = False
    pieces: bool = False
    special: bool | None = None
    opens_turn: bool = True


class CallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New output of one tool call. `index` counts a request's calls from 0. `id` and `name` are sent once,
    first; the concatenated `arguments` are one JSON object, incomplete if the model did not finish it."""

    index: Count
    id: Id = ""
    name: str = ""
    arguments: str = ""


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New output of one request in one step, by channel.

    `sequence` counts a request's deltas from 0; a gap or a duplicate is an error. `text` is content, the only
    channel of a raw completion; `reasoning` precedes it. All may be empty while a character, a marker or a
    possible stop string is incomplete.
    """

    id: Id
    sequence: Count
    tokens: list[Token]
    text: str = ""
    likelihoods: list[TokenLogprob] = []
    """Logprobs of `tokens`, if requested, without reasoning and marker tokens. The end token is included only
    if prompt logprobs are requested too."""
    reasoning: str = ""
    calls: list[CallDelta] = []
    """In order. Content may come between two calls; within one delta `text` precedes `calls`."""


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a finished request. `cached_tokens`: prompt tokens taken from the prefix cache.
    `reasoning_tokens`: completion tokens that are reasoning, without markers. `accepted_tokens` and
    `rejected_tokens`: draft tokens. `sparse_tokens`: prompt tokens skipped by sparse prefill."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0
    accepted_tokens: Count = 0
    rejected_tokens: Count = 0
    sparse_tokens: Count = 0


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds that a request spent in each phase, by the worker's clock."""

    queued_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class SparsePrefill(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sparse prefill: of a prompt of more than `above` tokens, run only the most important share `keep`. 1:
    all of it."""

    keep: Share = 0.3
    above: Count = 8192


class PrefixReuse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prefix-cache hit of a prompt.

    `tokens`: number of reused tokens. `tier`: `disk` if any part was read from disk, else `ram`; `none`
    without reuse. `miss`: why not more was reused, “diverged_at_N”, “incomplete”, “request” or “off” (see
    docs/tuning.md); empty if everything was. `message`, `role`: if the conversation goes on, which message no
    stored prompt continues with, counted from 0 as the chat template has them; None: unknown. `left_out`:
    position ranges (end exclusive) that sparse prefill skips, in order.
    """

    tokens: Count = 0
    tier: str = "none"
    miss: str = ""
    left_out: list[tuple[Count, Count]] = []
    message: Count | None = None
    role: Name = ""

    @property
    def sparse_tokens(self) -> int:
        """Number of tokens that sparse prefill skips."""
        return sum(last - first for first, last in self.left_out)


class RequestStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status of a request in its worker. `phase`: `waiting`, `prefill` or `decode`. `prefilled`
    includes reused tokens. `seconds` and `first_token_s` count from its arrival. `preemptions`: how often it
    was preempted and queued again. `work` changes with work on the prompt that no other field shows, such as
    encoding images."""

    id: Id
    phase: str
    prompt_tokens: Count
    prefilled: Count = 0
    answered: Count = 0
    seconds: Seconds = 0.0
    first_token_s: Seconds | None = None
    reuse: PrefixReuse | None = None
    preemptions: Count = 0
    work: Count = 0


class AdapterInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter of a worker's model. `digest`: hexadecimal, of its files; `rank`: the highest of a layer;
    `bytes`: its memory; `folder`: where it was loaded from, so that other workers can load it."""

    name: Name
    digest: Name
    rank: Count = 0
    bytes: Count = 0
    folder: Annotated[str, Meta(max_length=8192)] = ""


class PrefixStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prefix-cache statistics of a worker since its start. `misses` counts requests by `PrefixReuse.miss`,
    without positions. `read_timeouts`: requests that continued without blocks on disk because a read timed
    out. `written_bytes`: to the disk. `writes_limit`, `writes_left`: of the write budget, which all workers
    that use the folder share: bytes a day, and those that may be written now."""

    ram_bytes: Count = 0
    ram_limit: Count = 0
    disk_bytes: Count = 0
    disk_limit: Count = 0
    blocks: Count = 0
    snapshots: Count = 0
    lookups: Count = 0
    hits: Count = 0
    prompt_tokens: Count = 0
    reused_tokens: Count = 0
    misses: dict[str, Count] = {}
    read_timeouts: Count = 0
    written_bytes: Count = 0
    writes_limit: Count = 0
    writes_left: Count = 0


RANKS_MAX = 1024
"""Maximum number of processes that run one model together."""


class MemoryUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory usage of a process, in bytes: resident set, MLX's active, peak and cached memory
    (`device_spare_bytes`), and the footprint (`protocol.common.footprint`). 0: unknown."""

    resident_bytes: Count = 0
    device_bytes: Count = 0
    device_peak_bytes: Count = 0
    device_spare_bytes: Count = 0
    footprint_bytes: Count = 0


class RankMemory(MemoryUsage, frozen=True, kw_only=True, omit_defaults=True):
    """Memory usage of a follower rank. `host`: its machine's host name."""

    rank: Count
    host: Name = ""


class ExpertStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Experts that are read from disk: `slots` of the `experts` of each layer are in memory, `bytes` in all.
    Since the start: experts `wanted` by passes, once for each layer, those of them `read`, their bytes, and
    the seconds that this took."""

    slots: Count = 0
    experts: Count = 0
    bytes: Count = 0
    wanted: Count = 0
    read: Count = 0
    read_bytes: Count = 0
    read_s: Seconds = 0.0


class Resources(MemoryUsage, frozen=True, kw_only=True, omit_defaults=True):
    """Memory usage and uptime of a worker's process. `ranks`: memory of its follower ranks, if it has any.
    `experts`: None if all experts are in memory."""

    uptime_s: Seconds = 0.0
    ranks: Annotated[list[RankMemory], Meta(max_length=RANKS_MAX)] = []
    experts: ExpertStatus | None = None


class MemoryPressure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory pressure of a worker's machine. `level`: as its system reports it, `none`, `warning` or
    `critical`. `relief`: what the worker does about it, until it has been over for a while: `none`, `shrink`
    (caches), `drop_idle` (prefixes in memory, too) or `refuse_long` (new long prompts, too)."""

    level: Name = "none"
    relief: Name = "none"


class SpecDecodeStats(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of accepted and rejected draft tokens."""

    accepted: Count = 0
    rejected: Count = 0


class SpecDecodeStatus(SpecDecodeStats, frozen=True, kw_only=True, omit_defaults=True):
    """Draft tokens of a worker since its start; `sources`: the same by drafter."""

    sources: dict[str, SpecDecodeStats] = {}


class ImageStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Image embedding cache of a worker: its size and number of entries (`kept`), and since its start the
    images `encoded` and the cache `hits`. Images within a reused prefix count as neither."""

    bytes: Count = 0
    bytes_max: Count = 0
    kept: Count = 0
    encoded: Count = 0
    hits: Count = 0


class PreparationStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Preparation queue of a worker: requests that wait for a thread that tokenizes, or have one (`running`),
    and the `bytes` of both. `oldest_s`: seconds since the arrival of the oldest that waits. Since the start:
    requests that got a thread (`started`), the seconds that they had waited (`waited_s`), and those refused
    because the queue was full (`refused`) or cancelled before their end (`cancelled`)."""

    waiting: Count = 0
    running: Count = 0
    bytes: Count = 0
    oldest_s: Seconds = 0.0
    started: Count = 0
    waited_s: Seconds = 0.0
    refused: Count = 0
    cancelled: Count = 0


class KVCacheQuantization(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker quantizes KV caches: `bits` per value, in groups of `group_size` values with a scale
    each."""

    bits: Count
    group_size: Count


class Capabilities(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capabilities of a worker's model: generation and its features, embeddings, reranking. `layout`: what
    its chat template wants of messages, besides the usual. `unread`: what of its output is not recognized,
    and would be text: `tool_calls`, `reasoning`. `template_problem`: why it renders no conversation.
    `image_problem`: why a vision model takes no images."""

    images: bool = False
    videos: bool = False
    tools: bool = False
    thinking: bool = False
    system_in_place: bool = False
    generation: bool = True
    embeddings: bool = False
    rerank: bool = False
    layout: list[str] = []
    unread: list[str] = []
    template_problem: str = ""
    image_problem: str = ""


class PassCheck(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kind of forward pass, compared with passes of one row. `kind`: `decode` (one token of each of `rows`
    rows), `verify` (`tokens` tokens of each row), `prompts` (prompts of several rows together) or `chunks` (a
    prompt in chunks of `tokens`). `differs_at`: number of the first token that differs, from 1; None: all are
    equal. `difference`: the largest difference of a logprob up to there."""

    kind: Literal["decode", "verify", "prompts", "chunks"]
    rows: Count
    tokens: Count = 1
    differs_at: Count | None = None
    difference: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs, not even by rounding."""
        return self.differs_at is None and self.difference == 0.0


class Exactness(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Comparison of batched passes with passes of one row, measured on the device. `is_complete`: whether the
    time sufficed for all checks. `rows_max` and `draft_tokens_max`: the limits of `--exact` for the rows of a
    decode pass, and for the tokens of a verify pass, which then has one row; None: none. `chip`: wrong
    results of the device."""

    checks: list[PassCheck] = []
    is_complete: bool = True
    rows_max: Count | None = None
    draft_tokens_max: Count | None = None
    chip: list[str] = []


class ContextFit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What fits beside a loaded model: `tokens` of one request, of the model's own `context_length`, which
    take `row_bytes` of the `cache_bytes` for KV caches; `tokens_max` of all requests together."""

    context_length: Count
    tokens: Count
    tokens_max: Count
    row_bytes: Count
    cache_bytes: Count


class ModelReport(Struct, frozen=True, kw_only=True):
    """What `doctor` measures of a model. `context`: None if the memory for caches is unknown."""

    exactness: Exactness
    context: ContextFit | None
    capabilities: Capabilities = Capabilities()


class OrphanedRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that a worker still has although its gateway is gone, running or ended since.

    `id`: of the attempt. `deltas`: number of deltas or chunks made so far, of which those from `first` on can
    be sent again. `whole`: so can all its other messages."""

    id: Id
    deltas: Count = 0
    first: Count = 0
    whole: bool = False


class AdoptedRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much the gateway has of a row that it adopts: its number of deltas or chunks, and of prompt tokens
    with logprobs, and whether its `Accepted` and its `PrefixHit`."""

    id: Id
    deltas: Count = 0
    scored: Count = 0
    accepted: bool = False
    reused: bool = False
