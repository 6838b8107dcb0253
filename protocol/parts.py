"""What messages are made of: numbers and names within bounds, and the structs that travel inside of messages.

Like messages, a part may gain fields that have defaults, and skips those it does not know. Only messages are
tagged: what a part is follows from where it stands.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Neither infinite nor NaN: no JSON document could hold those."""
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Id = Annotated[str, Meta(max_length=256)]
"""Of a request, or of an incarnation."""
Name = Annotated[str, Meta(max_length=1024)]
Bytes = bytes
"""Under a name that a field called `bytes` does not hide."""


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. `None` leaves the choice to the model's generation_config.

    `seed` is always set by the gateway, so that a request can be repeated anywhere with the same outcome:
    the token at a position depends on the seed and that position only.
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
    """How many of the most likely tokens to report beside the drawn one; None: report nothing."""


class Media(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image or a video of a request, in the order of their placeholders.

    Its bytes are frame number `frame` behind the message; those of a video that came as images, the `frames`
    from there on. `mime` is what the bytes show, `video/…` for the file of a video; `sha256`, hexadecimal, is
    of all of them in order. It is made no larger than `pixels_max` before a model sees it; None: as the model
    likes. `param`: where the client has put it, for errors."""

    frame: Count
    frames: Count = 1
    mime: str
    sha256: str
    pixels_max: Count | None = None
    param: str = ""


class Likelihood(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A token's bytes and its natural log-probability; `top` are the most likely tokens at its position."""

    bytes: Bytes
    logprob: float
    top: list[tuple[Bytes, float]] = []


class PromptToken(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A token of a prompt, as `Likelihood`. The first one follows nothing: its `logprob` is None."""

    bytes: Bytes
    logprob: float | None = None
    top: list[tuple[Bytes, float]] = []


class Form(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer's content must be. `kind` says what `text` is: `json_schema`, `regex`, `lark` (a
    grammar), `choice` (a JSON array of strings), or `json_object`, where it is empty. `param`: what the
    client calls it, for errors."""

    kind: Name
    text: str = ""
    param: Name = ""


class Calling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request's tools are called. `required`: the answer is calls, and nothing else; `name`: of this
    tool. `single`: the answer ends with its first call. `strict`: the tools whose arguments must be what
    their schema says; in a required call those of any tool must."""

    required: bool = False
    name: Name = ""
    single: bool = False
    strict: list[Name] = []


class Tokenizing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wanted of a prompt that is only taken apart: beside their number its `tokens`, and the `pieces`
    of text that these stand for. `special`: whether what the tokenizer puts around every text is put around
    this one; None: as if it were to be answered. `opens_turn`: a conversation ends where the model begins."""

    tokens: bool = False
    pieces: bool = False
    special: bool | None = None
    opens_turn: bool = True


class CallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How one call of a tool grows. `index` counts an answer's calls from 0. `id` and `name` come once,
    first; `arguments`, joined, are one JSON object, unfinished where the model has left them so."""

    index: Count
    id: Id = ""
    name: str = ""
    arguments: str = ""


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one request gained in one step: the growth of each of its answer's channels.

    `sequence` counts a request's deltas from 0: a gap or a double is a fault. `text` is the content's, which
    is all there is of a raw completion; `reasoning` what the model thought before it. All may be empty while
    a character, a marker or a possible stop string is incomplete.
    """

    id: Id
    sequence: Count
    tokens: list[Token]
    text: str = ""
    likelihoods: list[Likelihood] = []
    """One for each of `tokens`, if the request asks for them; none for a token of a thought or a marker, and
    of one that ends the answer only if the request asks for those of its prompt as well."""
    reasoning: str = ""
    calls: list[CallDelta] = []
    """In order. Content may come between two calls; within one delta `text` stands before `calls`."""


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a finished request. `cached_tokens`: how much of the prompt was not computed again.
    `reasoning_tokens`: how many of the completion's are thoughts, the markers around them left out. Of the
    tokens that were drafted, `accepted_tokens` were right and `rejected_tokens` were not. Of the prompt
    `sparse_tokens` were left out."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0
    accepted_tokens: Count = 0
    rejected_tokens: Count = 0
    sparse_tokens: Count = 0


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds a request spent in each phase, on the worker's clock."""

    queued_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class Sparse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of a prompt with more than `above` tokens only the share `keep` is to be run: what matters most to what
    follows. 1: all of it."""

    keep: Share = 0.3
    above: Count = 8192


class Reuse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a prompt had been computed before.

    `tokens` of it were. `tier`: `disk` if any of it had to be read from there, else `ram`; `none` where
    nothing was reused. `miss` says why it was not more; it is empty where all was. `left_out`: the parts
    of the prompt that are not run at all, each from one position to before another, in order.
    """

    tokens: Count = 0
    tier: str = "none"
    miss: str = ""
    left_out: list[tuple[Count, Count]] = []

    @property
    def sparse_tokens(self) -> int:
        """How many tokens are not run at all."""
        return sum(last - first for first, last in self.left_out)


class RowStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request stands in its worker: `waiting`, `ahead` (its prompt is run, and it waits for a place),
    `prefill` or `decode`. `prefilled` counts the reused tokens too. Seconds are since its arrival there.
    `preemptions`: how often it had to give way, and to wait again."""

    id: Id
    phase: str
    prompt_tokens: Count
    prefilled: Count = 0
    answered: Count = 0
    seconds: Seconds = 0.0
    first_token_s: Seconds | None = None
    reuse: Reuse | None = None
    preemptions: Count = 0


class TopPrefix(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored prefix that is used often, without its text."""

    tokens: Count
    uses: Count
    bytes: Count
    pinned: bool = False


class PrefixStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prefix cache of a worker since its start. `misses` counts requests by `Reuse.miss`, the positions
    left out."""

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
    top: list[TopPrefix] = []


RANKS_MAX = 1024
"""Processes that run one model together."""


class Taken(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process takes, in bytes: `resident_bytes` of the machine's memory; of MLX's arrays
    `device_bytes`, at the most so far `device_peak_bytes`, and `device_spare_bytes` that MLX keeps to be used
    again. 0: not known."""

    resident_bytes: Count = 0
    device_bytes: Count = 0
    device_peak_bytes: Count = 0
    device_spare_bytes: Count = 0


class RankTaken(Taken, frozen=True, kw_only=True, omit_defaults=True):
    """Of a rank of a set that is not the first. `host`: what its machine calls itself."""

    rank: Count
    host: Name = ""


class Resources(Taken, frozen=True, kw_only=True, omit_defaults=True):
    """Of a worker's process. `uptime_s`: since it began. `ranks`: of the others, where it is one of a set."""

    uptime_s: Seconds = 0.0
    ranks: Annotated[list[RankTaken], Meta(max_length=RANKS_MAX)] = []


class DraftTally(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of tokens that were drafted, how many were right and how many were not."""

    accepted: Count = 0
    rejected: Count = 0


class DraftStatus(DraftTally, frozen=True, kw_only=True, omit_defaults=True):
    """Of all that a worker has drafted since its start; `sources`: of each that made drafts."""

    sources: dict[str, DraftTally] = {}


class ImageStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The encoded images that a worker keeps, and since its start how many it has `encoded`, and how many of
    its prompts' it found kept (`hits`). Those behind a prefix that was reused whole are in neither."""

    bytes: Count = 0
    bytes_max: Count = 0
    kept: Count = 0
    encoded: Count = 0
    hits: Count = 0


class Capabilities(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's model can be asked: to answer, with what there is for that, or for numbers alone."""

    images: bool = False
    videos: bool = False
    tools: bool = False
    thinking: bool = False
    system_in_place: bool = False
    generation: bool = True
    embeddings: bool = False
    rerank: bool = False
