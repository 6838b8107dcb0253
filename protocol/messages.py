"""The messages between gateway and worker, filed by who receives them; made of `parts`.

Every message carries the incarnation of its sender: a random name drawn at process start. What a dead
incarnation said, and ZeroMQ still delivers, is thereby known as such and dropped. Fields added later have
defaults, and unknown fields are skipped, so neighbouring versions understand each other; `PROTOCOL_VERSION`
moves only when that stops being true.
"""

from __future__ import annotations

import secrets

from msgspec import UNSET, Raw, Struct, UnsetType

from protocol.errors import RequestError
from protocol.parts import (
    Bytes,
    Calling,
    Capabilities,
    Count,
    Delta,
    DraftStatus,
    Form,
    Id,
    ImageStatus,
    Media,
    Name,
    Pid,
    PrefixStatus,
    PromptToken,
    Resources,
    Reuse,
    RowStatus,
    Sampling,
    Sparse,
    Timings,
    Token,
    Tokenizing,
    Usage,
)

PROTOCOL_VERSION = 1


def new_incarnation() -> str:
    """A name for one life of one process: 16 hexadecimal digits, never used again."""
    return secrets.token_hex(8)


class Message(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What every message is: tagged with its class name, signed with its sender's incarnation."""

    incarnation: Id


# --- gateway -> worker -------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The gateway has a new peer, or does not know the one that spoke. A worker that hears a gateway
    incarnation it has not met introduces itself anew; whatever it ran for another one has no reader left."""

    version: int


class Rejected(Message, frozen=True):
    """The gateway will not work with this peer (another protocol version); the worker ends itself."""

    reason: str


class Generate(Message, frozen=True):
    """One request. `messages` is the canonical conversation; `prompt` (text) or `tokens` take its place for
    raw completion, of what lies before `suffix`, if there is one. `messages`, `tools` and `template_kwargs`
    are packed (`protocol.conversation`). `source`: what the client calls its prompt, for errors; empty: by
    the name it has here. `max_tokens` None means until the context is full. Of several waiting, the smallest
    `priority` is served first. One that is not done `deadline_s` after its arrival fails. Prefixes are shared
    between requests of one `cache_salt` only; those of a request with `cache_pin` are the last to be
    forgotten. Each thought of its answer is closed when it has `thinking_budget` tokens; None: none is.
    With `speculation` what it may say next is drafted, from its `prediction` too, which changes none of it.
    `sparse`: how much of a long prompt is to be run; None: as is usual there. `left_out`: what of it the
    worker before has left out, as it is to be again.

    `resume`: tokens that another worker has answered before it was lost. The answer goes on behind them, with
    deltas numbered from 0 again, as if nothing had happened; its usage counts them.

    `echo`: the client is told its prompt: `Accepted` has the text of one that came as `tokens`, and where
    log-probabilities are asked for, `Scored` has those of the prompt; `scored` of its tokens the client has.
    Then `max_tokens` may be 0.

    `form`: what the content must be; None: whatever it likes to be. `calling`: how `tools`
    may be called; None: freely.

    `tokenizing`: nothing is run. `Accepted` tells what is wanted of the prompt, however long it is, and the
    request is `Finished`; None: it is run."""

    id: Id
    sampling: Sampling
    messages: Raw | UnsetType = UNSET
    prompt: str | None = None
    tools: Raw | UnsetType = UNSET
    template_kwargs: Raw | UnsetType = UNSET
    media: list[Media] = []
    stop: list[str] = []
    max_tokens: Count | None = None
    ignore_eos: bool = False
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    cache_pin: bool = False
    resume: list[Token] = []
    thinking_budget: Count | None = None
    speculation: bool = True
    prediction: str = ""
    sparse: Sparse | None = None
    left_out: list[tuple[Count, Count]] = []
    tokens: list[Token] | None = None
    suffix: str = ""
    source: Name = ""
    echo: bool = False
    scored: Count = 0
    form: Form | None = None
    calling: Calling | None = None
    tokenizing: Tokenizing | None = None


class Encode(Message, frozen=True):
    """What `Embed` and `Rank` have in common: `count` texts for a model that answers each with numbers.

    `texts`: packed (`protocol.texts`). A text of more than `tokens_max` tokens is cut; None: it is refused
    where it is too long for the model. `source`: what the client calls its texts, for errors. `priority` and
    `deadline_s` as in `Generate`. `answered`: the places of those that another worker has answered before it
    was lost; the answer has the others."""

    id: Id
    texts: Raw
    count: Count
    tokens_max: Count | None = None
    source: Name = "input"
    priority: int = 0
    deadline_s: float | None = None
    answered: list[Count] = []


class Embed(Encode, frozen=True):
    """A vector of each text is wanted. `dimensions`: so many of its numbers, the first ones, at length 1
    again; None: all."""

    dimensions: Count | None = None


class Rank(Encode, frozen=True, kw_only=True):
    """How relevant each text is for `query`: a vector of one number, 0 to 1. `instruction`: what makes it so,
    for models that are told; empty: as they are used to be told."""

    query: str
    instruction: str = ""


class Cancel(Message, frozen=True):
    """Nobody waits for this request any more. Idempotent; unknown ids are no error."""

    id: Id


class ClearCache(Message, frozen=True):
    """Forget every stored prefix that no request is using, in memory and on disk. Answered by `CacheCleared`
    with the same `id`."""

    id: Id


Request = Generate | Embed | Rank
"""What a client can ask of a worker."""

ToWorker = Welcome | Rejected | Request | Cancel | ClearCache


# --- worker -> gateway -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a worker on a connection. `host`: the machine that it runs on, by its name; empty:
    not said."""

    version: int
    model: Name
    pid: Pid
    versions: dict[str, str] = {}
    host: Name = ""


class Loading(Message, frozen=True):
    """Progress of a load, in bytes of weights."""

    done: Count
    total: Count


class Ready(Message, frozen=True):
    """The model is loaded and warm. `cache_bytes_max`: what the caches of all requests may take; None: not
    limited. `tokens_max`: as many tokens of prompts and answers as all rows can have at once, by their number
    and by their bytes; 0: not said. `identity`: the same for workers that can go on with each other's
    answers, while `model` is a name that may come to stand for another one. `start_s`: what each part of its
    start took, in seconds. `store`: where it writes prefixes, the same for those who find each other's when
    they start; empty: nowhere. `plan`: what runs the model, and how it is split, where that is not one
    process alone; of two plans answers may differ in their words. `stands_in`: it goes on with what another
    model began under its name."""

    model: Name
    context_length: Count
    running_max: Count
    parameters: Count = 0
    capabilities: Capabilities = Capabilities()
    cache_bytes_max: Count | None = None
    tokens_max: Count = 0
    identity: str = ""
    start_s: dict[str, float] = {}
    store: Name = ""
    plan: str = ""
    stands_in: bool = False


class Heartbeat(Message, frozen=True):
    """Sent by the worker's I/O thread every 250 ms. `steps` is the model thread's own counter: when rows run
    and it stands still, the process is alive and the model is not. `rows` are those the worker holds, the
    eldest first; `prefix` is None where nothing is reused, `images` where the model takes none, `drafts`
    where there are none, `resources` where they are not told."""

    running: Count
    waiting: Count
    steps: Count
    cache_bytes: Count = 0
    rows: list[RowStatus] = []
    prefix: PrefixStatus | None = None
    resources: Resources | None = None
    images: ImageStatus | None = None
    drafts: DraftStatus | None = None


class Accepted(Message, frozen=True):
    """The request is well-formed and queued: from here on it ends in `Finished` or `Failed`. `prompt`: the
    text of a prompt that came as tokens and is to be told. `tokens` and `pieces`: if `Tokenizing` asks for
    them."""

    id: Id
    prompt_tokens: Count
    prompt: str = ""
    tokens: list[Token] = []
    pieces: list[str] = []


def tokens_told(message: Accepted) -> int:
    """How many tokens of its prompt it tells, as numbers or as text, beside counting them."""
    return message.prompt_tokens if message.tokens or message.prompt else 0


class Reused(Message, frozen=True):
    """The request has left the queue; so much of its prompt need not be computed. At most once a request, and
    before its first delta."""

    id: Id
    reuse: Reuse


class Scored(Message, frozen=True):
    """How likely the model finds a part of the prompt: of `tokens`, the first of which is number `first`. In
    order, each once, and all of them before the first delta."""

    id: Id
    first: Count
    tokens: list[PromptToken]


class Events(Message, frozen=True):
    """One step's deltas of every request that gained something."""

    deltas: list[Delta]


class Encoded(Message, frozen=True):
    """What one step has brought to an `Embed` or a `Rank`: the vectors of the texts at `places`, one behind
    the other, all equally long, float32, little-endian. Each text's comes once. `sequence` counts a request's
    from 0; all of them come before its end."""

    id: Id
    sequence: Count
    places: list[Count]
    vectors: Bytes


class Finished(Message, frozen=True):
    """Terminal. `reason` is `stop`, `length`, or `tool_calls`: the answer has come to its own end, and has at
    least one whole call. `stop`: the stop string before which it ends; empty: none. `continued_by`: the plan
    that went on with what another had begun, in whose words it may differ; only the gateway says so."""

    id: Id
    reason: str
    usage: Usage
    timings: Timings = Timings()
    stop: str = ""
    continued_by: str = ""


class Failed(Message, frozen=True):
    """Terminal. `code` is one of `protocol.errors.Code`. `details`: the numbers of which `message` speaks, by
    name."""

    id: Id
    code: str
    message: str
    param: str | None = None
    details: dict[Name, Count] = {}


def failed(incarnation: str, id: str, error: RequestError) -> Failed:
    """An error as it is told of a request."""
    return Failed(
        incarnation=incarnation,
        id=id,
        code=error.code,
        message=error.message,
        param=error.param,
        details={name: number for name, number in error.details.items() if isinstance(number, int)},
    )


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
    | Scored
    | Events
    | Encoded
    | Finished
    | Failed
    | CacheCleared
    | Draining
    | Goodbye
)
