"""Values passed between the worker's parts: requests, their parameters, inputs, step outputs, cache slices.

Only plain Python values are passed: arrays never leave the model thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from protocol.settings.worker import WorkerSettings
from protocol.types import CallDelta, Capabilities, Exactness, SparsePrefill


class PreparationCancelled(Exception):
    """The request was cancelled while it was being prepared; it has no outcome."""


class CancelToken:
    """Cancellation token of one preparation. The I/O thread cancels it, the preparer's thread checks it
    between two pieces of work."""

    __slots__ = ("_is_cancelled",)

    def __init__(self) -> None:
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def check(self) -> None:
        """Raise `PreparationCancelled` if the request was cancelled."""
        if self._is_cancelled:
            raise PreparationCancelled


NEVER = CancelToken()
"""The token of a preparation that nothing cancels."""


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """`bits` per value in groups of `group_size`, with a scale and a bias each."""

    bits: int
    group_size: int = 64


def kv_quantization_of(settings: WorkerSettings) -> KVQuantization | None:
    """Return how a worker quantizes KV caches; None: it does not."""
    return None if settings.kv_bits is None else KVQuantization(settings.kv_bits, settings.kv_group_size)


ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of the storable dtypes, by their safetensors names."""


MEDIA_KEYS = 2**32
"""Smallest key that replaces an image token; keys are below 2**64 (`ImageInput.keys`)."""


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """An array as bytes: little-endian, row-major, contiguous; not copied. `begin`: position of `data` in the
    buffer that it is a view of. Raises `ValueError` if dtype, shape and size do not match."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    begin: int = 0

    def __post_init__(self) -> None:
        nbytes = memoryview(self.data).nbytes
        if self.dtype not in ITEM_BYTES or min(self.shape, default=0) < 0:
            raise ValueError(f"invalid array: {self.dtype} {self.shape}")
        if nbytes != math.prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise ValueError(f"{nbytes} bytes do not match {self.dtype} {self.shape}")


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image or a video in a prompt, at position `first`; `tokens` are the placeholders that upstream's
    processor writes for it.

    `digest`: hexadecimal hash of its content and of everything else that its encoding depends on. `inputs`:
    the encoder's inputs, by upstream's names. `nbytes`: estimated size of its embedding.
    """

    digest: str
    first: int
    tokens: tuple[int, ...]
    inputs: Mapping[str, ArrayBytes]
    nbytes: int = 0

    @property
    def input_bytes(self) -> int:
        """Size of the encoder's inputs."""
        return sum(memoryview(each.data).nbytes for each in self.inputs.values())

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first + len(self.tokens)

    def keys(self) -> tuple[int, ...]:
        """Return the keys that replace its tokens in `EngineRequest.tokens`, one for each, below 2**64. Equal
        images have equal keys, so prompts with equal images share prefixes."""
        seed = int(self.digest[:16], 16)
        span = 2**64 - MEDIA_KEYS
        return tuple(MEDIA_KEYS + (seed + place) % span for place in range(len(self.tokens)))


def keyed(tokens: Sequence[int], images: Sequence[ImageInput]) -> Sequence[int]:
    """Return a prompt's tokens, with image tokens replaced by keys."""
    if not images:
        return tokens
    keys = list(tokens)
    for image in images:
        keys[image.first : image.end] = image.keys()
    return keys


class ForcedTokens(NamedTuple):
    """Forced continuation of an output (jump-forward). The first `certain` tokens are the only allowed ones.
    The others are the likeliest form; the same text may also come as other tokens or white space."""

    tokens: tuple[int, ...] = ()
    certain: int = 0


NO_DRAFTS: Mapping[str, Sequence[int]] = {}


PRICED_COLUMNS = 5
"""Number of tokens per row in the measurement of a verify step's cost."""


BACKLOG_MAX = 8
"""Maximum number of unread tokens of a row with which it may be drafted for."""


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text. `types`: token type (0 or 1) of each token; empty: all 0. `dimensions`: truncate its
    vector to this many dimensions and normalize it again; None: all dimensions."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The tokenized texts of one request, each within the model's context. `answered`: indices of texts whose
    vectors the client already has. The smallest `priority` is scheduled first. `deadline_s`: timeout in
    seconds after its arrival; None: none."""

    id: str
    texts: tuple[Text, ...]
    answered: frozenset[int] = frozenset()
    priority: int = 0
    deadline_s: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class GuideError(Exception):
    """A grammar allows no next token, or is too complex for the text generated so far."""


class Guide(Protocol):
    """Grammar state of one output: a function of its tokens alone.

    Used by one thread at a time, not always the same one.
    """

    def accept_token(self, token: int) -> None:
        """Advance by the output's next token, sampled or forced. A disallowed token ends the constraint."""

    def fill(self, mask: memoryview) -> bool:
        """Set bit t % 32 of word t // 32 of `mask` (uint32) for each allowed token t. False: all tokens are
        allowed, and nothing was written. At least one is always allowed. Releases the GIL if it takes long.

        `mask` is zeroed and has a bit for each of the model's logits, which may outnumber the tokens."""

    def forced_tokens(self, most: int) -> ForcedTokens:
        """Return at most `most` forced tokens. The state does not change."""


class Grammar(Protocol):
    """Compiled grammar of a request. Immutable and shared between threads."""

    def open(self, answered: Sequence[int]) -> Guide:
        """Return the state after the output tokens `answered`. Cheap apart from replaying those."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Thinking budget: after `tokens` tokens (at least 1) of reasoning, the tokens `closing` are forced, of
    which the first ends it. `opening`: the tokens that begin reasoning. `is_open`: the output begins within
    it. `calling`: the token that begins a tool call and so also ends reasoning; None: no such token."""

    tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    is_open: bool
    calling: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, with all defaults resolved. Temperature 0 is greedy.

    `top_p` 1, `top_k` 0, `min_p` 0 and the neutral penalties (1, 0, 0) are off. The random number for a
    position depends only on `seed` and the position. `logit_bias` is added to the logits.
    `repetition_penalty` divides positive (multiplies negative) logits of tokens in the prompt or the output.
    `presence_penalty` and `frequency_penalty` are subtracted for tokens of the output, once or for each
    occurrence. The output begins with the tokens `forced`. `logprobs`: number of top tokens reported with
    each sampled token's logprob; None: no logprobs. `thinking_budget`: budget of each reasoning section;
    None: no limit. `grammar`: constraint on the output after the forced tokens; None: none.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    forced: tuple[int, ...] = ()
    logprobs: int | None = None
    thinking_budget: ThinkingBudget | None = None
    grammar: Grammar | None = None


class MessageEnd(NamedTuple):
    """A message of a prompt: its role, and the position behind which the next one begins."""

    position: int
    role: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for the model thread: rendered and tokenized, with all defaults resolved.

    `max_tokens` is at least 1, or 0 for an `echo`, and fits the context. `end_tokens` is empty if the request
    ignores them. The smallest `priority` is scheduled first. `deadline_s`: timeout in seconds after its
    arrival; None: none. Prefixes are shared with requests of the same `salt`. `boundaries`: positions in
    `tokens`, in order, up to which later prompts are likely to be equal, such as the end of the system
    prompt. `message_ends`: those of the messages before the last answer. `pin`: its stored prefixes are
    evicted last. `resume`: tokens generated by another worker. `source`: the prompt's parameter name, for
    errors. `opening`: the initial state of the model's output format; None: raw text. `echo`: return the
    prompt, with logprobs if requested; the client already has the first `scored` tokens. `echo_text`: the
    prompt's text, if it came as tokens. `tools`: name and JSON schema of the arguments of each callable tool.
    `single_call`: the output ends after its first tool call. `calls_only`: it is tool calls only. `images`:
    its images, in order; `tokens` has their keys in place of image tokens, and never ends with one.
    `speculation`: tokens may be drafted, without changing the output; `prediction` is text that the output is
    likely to repeat. `sparse`: sparse prefill of a long prompt; None: the default. `left_out`: position
    ranges that another worker did not prefill. `relaxed`: keywords of its JSON schema that the output may
    violate. `adapter`: its name; empty: the model alone. `session` names the agent that it is a turn of,
    `parent_session` the one that started that agent; empty: unknown.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    max_tokens: int
    end_tokens: frozenset[int]
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""
    pin: bool = False
    boundaries: tuple[int, ...] = ()
    message_ends: tuple[MessageEnd, ...] = ()
    resume: tuple[int, ...] = ()
    source: str = "messages"
    opening: str | None = None
    echo: bool = False
    scored: int = 0
    echo_text: str = ""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    single_call: bool = False
    calls_only: bool = False
    images: tuple[ImageInput, ...] = ()
    speculation: bool = True
    prediction: tuple[int, ...] = ()
    sparse: SparsePrefill | None = None
    left_out: tuple[tuple[int, int], ...] = ()
    relaxed: tuple[str, ...] = ()
    adapter: str = ""
    session: str = ""
    parent_session: str = ""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Result of a tokenize-only request: the number of tokens and, if requested, the `tokens`, the text of
    each (`pieces`), and the `text` of a prompt given as tokens."""

    id: str
    count: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    text: str = ""


class OutputDelta(NamedTuple):
    """New output by channel. `is_content`: the token is not part of reasoning, a tool call or a marker."""

    text: str = ""
    reasoning: str = ""
    is_content: bool = True
    calls: tuple[CallDelta, ...] = ()

    def then(self, later: OutputDelta) -> OutputDelta:
        """Return this delta followed by `later`, with this one's `is_content`."""
        text, reasoning = self.text + later.text, self.reasoning + later.reasoning
        return OutputDelta(text, reasoning, self.is_content, self.calls + later.calls)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Logprob of a sampled token or a prompt token, before bias, penalties, filters and temperature.

    `top`: the most likely tokens with their logprobs, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobTargets:
    """Prompt-logprob query of a chunk: logprobs of `tokens`, which follow its last positions, one for each,
    and of the `top` most likely tokens there."""

    tokens: tuple[int, ...]
    top: int


NO_TARGETS: Mapping[str, LogprobTargets] = {}


NO_LAST: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The embedding of an image, opaque, and its size."""

    payload: object
    nbytes: int


NO_EMBEDDINGS: Mapping[str, EncodedImage] = {}


class SampledToken(NamedTuple):
    """A sampled token, with its logprob if requested."""

    token: int
    likelihood: Logprob | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a decode step: at most one token for each started row, none for a row that has just joined.

    `likelihoods`: logprobs of the rows that request them. `failed`: rows whose grammar failed, with the
    error; they produce no more tokens. `further`: additional tokens of rows with drafts.
    """

    tokens: Mapping[str, int]
    likelihoods: Mapping[str, Logprob]
    failed: Mapping[str, Exception] = field(default_factory=dict)
    further: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheSlice:
    """A copy of a part of a row's KV cache. `payload` is opaque. `complete_from`: the first position that all
    layers have; a sliding window may have dropped earlier ones."""

    payload: object
    nbytes: int
    complete_from: int = 0


@dataclass(frozen=True, slots=True)
class CacheSegment:
    """A cache slice of the positions `first` to `last` (exclusive), of which the first `count` are used."""

    payload: object
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Requirements for resuming a row at a position. `window`: number of positions before it that
    sliding-window layers need; 0: there are no such layers. `has_states`: needs a state snapshot exactly
    there."""

    window: int = 0
    has_states: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model. `batched`: rows share forward passes. `cache_bytes_max`: memory left for
    all rows' caches; None: unknown. `fingerprint`: hexadecimal, equal for models that can use each other's
    stored caches; empty: caches are not stored. `identity`: the same without library versions; models with
    equal identities can continue each other's output. `plan`: backend and sharding, if several processes run
    the model. `token_bytes_max`: the most bytes of text, apart from white space, that one token can stand
    for; 0: unknown. `exactness`: whether batched passes give the results of one row; None: not measured.
    `kv_quantization`: how the KV caches of its rows are quantized; None: they are exact."""

    name: str
    context_length: int
    parameters: int
    capabilities: Capabilities
    batched: bool = True
    cache_bytes_max: int | None = None
    fingerprint: str = ""
    identity: str = ""
    plan: str = ""
    token_bytes_max: int = 0
    exactness: Exactness | None = None
    kv_quantization: KVQuantization | None = None
