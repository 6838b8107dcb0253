"""The messages between gateway and worker, filed by who receives them.

Every message carries the incarnation of its sender: a random name drawn at process start. What a dead
incarnation said, and ZeroMQ still delivers, is thereby known as such and dropped. Fields added later have
defaults, and unknown fields are skipped, so neighbouring versions understand each other; `PROTOCOL_VERSION`
moves only when that stops being true.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Neither infinite nor NaN: no JSON document could hold those."""
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Id = Annotated[str, Meta(max_length=256)]
"""Of a request, or of an incarnation."""
Name = Annotated[str, Meta(max_length=1024)]
Bytes = bytes
"""Under a name that a field called `bytes` does not hide."""


def new_incarnation() -> str:
    """A name for one life of one process: 16 hexadecimal digits, never used again."""
    return secrets.token_hex(8)


class Message(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What every message is: tagged with its class name, signed with its sender's incarnation."""

    incarnation: Id


# --- parts of messages -------------------------------------------------------------------------------


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
    """One image of a request; its bytes are frame number `frame` behind the message."""

    frame: Count
    mime: str
    sha256: str


class Likelihood(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A token's bytes and its natural log-probability; `top` are the most likely tokens at its position."""

    bytes: Bytes
    logprob: float
    top: list[tuple[Bytes, float]] = []


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one request gained in one step.

    `sequence` counts a request's deltas from 0: a gap or a double is a fault. `text` may be empty while a
    character or a possible stop string is incomplete.
    """

    id: Id
    sequence: Count
    tokens: list[Token]
    text: str = ""
    likelihoods: list[Likelihood] = []
    """One for each of `tokens`, if the request asks for them; none for a token that ends the answer."""


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a finished request. `cached_tokens`: how much of the prompt was not computed again."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds a request spent in each phase, on the worker's clock."""

    queued_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class Reuse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a prompt had been computed before.

    `tokens` of it were. `tier`: `disk` if any of it had to be read from there, else `ram`; `none` where
    nothing was reused. `miss` says why it was not more; it is empty where all was.
    """

    tokens: Count = 0
    tier: str = "none"
    miss: str = ""


class RowStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request stands in its worker: `waiting`, `ahead` (its prompt is run, and it waits for a place),
    `prefill` or `decode`. `prefilled` counts the reused tokens too. Seconds are since its arrival there."""

    id: Id
    phase: str
    prompt_tokens: Count
    prefilled: Count = 0
    answered: Count = 0
    seconds: Seconds = 0.0
    first_token_s: Seconds | None = None
    reuse: Reuse | None = None


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


class Capabilities(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's model can be asked."""

    images: bool = False
    tools: bool = False
    thinking: bool = False
    system_in_place: bool = False


# --- gateway -> worker -------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The gateway has a new peer, or does not know the one that spoke. A worker that hears a gateway
    incarnation it has not met introduces itself anew; whatever it ran for another one has no reader left."""

    version: int


class Rejected(Message, frozen=True):
    """The gateway will not work with this peer (another protocol version); the worker ends itself."""

    reason: str


class Generate(Message, frozen=True):
    """One request. `messages` is the canonical conversation; `prompt` (text) takes its place for raw
    completion. `max_tokens` None means until the context is full. Of several waiting, the smallest `priority`
    is served first. One that is not done `deadline_s` after its arrival fails. Prefixes are shared between
    requests of one `cache_salt` only; those of a request with `cache_pin` are the last to be forgotten.

    `resume`: tokens that another worker has answered before it was lost. The answer goes on behind them, with
    deltas numbered from 0 again, as if nothing had happened; its usage counts them."""

    id: Id
    sampling: Sampling
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    media: list[Media] = []
    stop: list[str] = []
    max_tokens: Count | None = None
    ignore_eos: bool = False
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    cache_pin: bool = False
    resume: list[Token] = []


class Cancel(Message, frozen=True):
    """Nobody waits for this request any more. Idempotent; unknown ids are no error."""

    id: Id


class ClearCache(Message, frozen=True):
    """Forget every stored prefix that no request is using, in memory and on disk. Answered by `CacheCleared`
    with the same `id`."""

    id: Id


ToWorker = Welcome | Rejected | Generate | Cancel | ClearCache


# --- worker -> gateway -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a worker on a connection."""

    version: int
    model: Name
    pid: Pid
    versions: dict[str, str] = {}


class Loading(Message, frozen=True):
    """Progress of a load, in bytes of weights."""

    done: Count
    total: Count


class Ready(Message, frozen=True):
    """The model is loaded and warm. `cache_bytes_max`: what the caches of all requests may take; None: not
    limited. `tokens_max`: as many tokens of prompts and answers as all rows can have at once, by their number
    and by their bytes; 0: not said. `identity`: the same for workers that can go on with each other's
    answers, while `model` is a name that may come to stand for another one."""

    model: Name
    context_length: Count
    running_max: Count
    parameters: Count = 0
    capabilities: Capabilities = Capabilities()
    cache_bytes_max: Count | None = None
    tokens_max: Count = 0
    identity: str = ""


class Heartbeat(Message, frozen=True):
    """Sent by the worker's I/O thread every 250 ms. `steps` is the model thread's own counter: when rows run
    and it stands still, the process is alive and the model is not. `rows` are those the worker holds, the
    eldest first; `prefix` is None where nothing is reused."""

    running: Count
    waiting: Count
    steps: Count
    cache_bytes: Count = 0
    rows: list[RowStatus] = []
    prefix: PrefixStatus | None = None


class Accepted(Message, frozen=True):
    """The request is well-formed and queued: from here on it ends in `Finished` or `Failed`."""

    id: Id
    prompt_tokens: Count


class Reused(Message, frozen=True):
    """The request has left the queue; so much of its prompt need not be computed. At most once a request, and
    before its first delta."""

    id: Id
    reuse: Reuse


class Events(Message, frozen=True):
    """One step's deltas of every request that gained something."""

    deltas: list[Delta]


class Finished(Message, frozen=True):
    """Terminal. `reason` is `stop` or `length`."""

    id: Id
    reason: str
    usage: Usage
    timings: Timings = Timings()


class Failed(Message, frozen=True):
    """Terminal. `code` is one of `protocol.errors.Code`."""

    id: Id
    code: str
    message: str
    param: str | None = None


class Draining(Message, frozen=True):
    """The worker wants no new requests: it ends when those it has are done, or before. `Goodbye` follows."""


class Goodbye(Message, frozen=True):
    """The worker ends on purpose; nothing follows."""

    reason: str


class CacheCleared(Message, frozen=True):
    """The answer to `ClearCache`: bytes given back in memory and on disk."""

    id: Id
    ram_bytes: Count
    disk_bytes: Count


ToGateway = (
    Hello
    | Loading
    | Ready
    | Heartbeat
    | Accepted
    | Reused
    | Events
    | Finished
    | Failed
    | CacheCleared
    | Draining
    | Goodbye
)
