"""What the service and the loop ask of a model, and the values that pass between them.

`worker/models` and `worker/engine` answer on MLX, `worker/fake` from a script. The ground of the worker: it
imports nothing of it, and no MLX. Only plain Python values cross: arrays never leave the model thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from protocol.messages import Generate
from protocol.parts import CallDelta, Capabilities, Sparse
from worker.drafts import NO_DRAFTS, Drafter, Weigher
from worker.guides import Foreseen, Grammar
from worker.pictures import Blob, Picture
from worker.texts import Encoder, TextsPreparer

Progress = Callable[[int, int], None]
"""Called while a model loads with (bytes of weights done, bytes in all), on the model thread."""


class ModelError(Exception):
    """A model that cannot be loaded, in words for the person who asked for it. Trying again is no help."""


class NoRoomError(Exception):
    """A model that does not fit beside what is in memory now. Trying again later may help."""


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """A thought has at most so many `tokens`, at least 1: then those of `closing` follow, the first ends it.
    `opening`: the tokens that begin one. `is_open`: the answer begins within one. `calling`: the token that
    begins a call and so ends a thought, too; None: there is none such."""

    tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    is_open: bool
    calling: int | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """How one request's tokens are drawn, every choice made. Temperature 0 is greedy.

    `top_p` 1, `top_k` 0, `min_p` 0 and the neutral penalties (1, 0, 0) are off. The token at a position
    depends on `seed` and the position. `logit_bias` is added to the logits. `repetition_penalty` divides (or,
    below zero, multiplies) the logits of tokens that the prompt or the answer has; `presence_penalty` and
    `frequency_penalty` are subtracted for tokens of the answer, once or once for each occurrence. The answer
    begins with the tokens of `forced`. `logprobs`: how many of the most likely tokens to report beside the
    drawn one; None: report nothing. `thoughts`: how long each may be; None: as long as it likes. `grammar`:
    what the answer is held to, forced tokens excepted; None: nothing.
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
    thoughts: ThoughtLimit | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the model thread takes it: rendered, tokenized, every default filled in.

    `max_tokens` is at least 1, or 0 for an `echo`, and fits the context. `end_tokens` is empty when the
    request ignores them. Of several waiting the smallest `priority` goes first. `deadline_s`: seconds from
    its arrival after which it is given up; None: never. Prefixes are shared with requests of the same `salt`.
    `boundaries`: positions in `tokens`, in order, up to which later prompts are likely to be the same, the
    system prompt's end for one. `pin`: what is stored of them is kept as long as possible. `resume`: what
    another worker has answered. `source`: the parameter that the prompt came in, for errors. `opening`: the
    state of the model's format in which its answer begins; None: it is raw text. `echo`: the client is told
    its prompt, and where log-probabilities are asked for, those of the prompt's tokens, of which it has
    `scored` already. `echo_text`: the prompt's text, where only the tokenizer knows it. `tools`: what the
    answer may call, each name with the JSON schema of its arguments. `single_call`: it ends with its first.
    `pictures`: its images, in order; in `tokens` their keys stand for theirs, the last token is none of them.
    `speculation`: what it says next may be drafted, which changes nothing of it; it is likely to say much of
    `prediction`. `sparse`: how much of a long prompt is to be run; None: as is usual here. `left_out`: what
    of it another worker has left out.
    """

    id: str
    tokens: tuple[int, ...]
    draw: Draw
    stop: tuple[str, ...]
    max_tokens: int
    end_tokens: frozenset[int]
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""
    pin: bool = False
    boundaries: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    source: str = "messages"
    opening: str | None = None
    echo: bool = False
    scored: int = 0
    echo_text: str = ""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    single_call: bool = False
    pictures: tuple[Picture, ...] = ()
    speculation: bool = True
    prediction: tuple[int, ...] = ()
    sparse: Sparse | None = None
    left_out: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt that is not to be run: how many tokens it has and, as far as they are asked for, these
    `tokens`, the `pieces` of text that they stand for, and the `text` of a prompt that came as tokens."""

    id: str
    count: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    text: str = ""


class Preparer(Protocol):
    """Template and tokenizer. Owned by one thread of the pool; never shared, never near MLX."""

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        """Raises `protocol.errors.RequestError` for whatever the request itself causes."""

    def tokenize(self, request: Generate, media: Sequence[bytes]) -> Tokenized:
        """For one that says what it wants by `tokenizing`. Raises as `prepare`, but takes prompts of any
        length, an empty one as well."""


class Growth(NamedTuple):
    """What an answer's channels gain. `is_content`: the token is none of a thought, a call or a marker."""

    text: str = ""
    reasoning: str = ""
    is_content: bool = True
    calls: tuple[CallDelta, ...] = ()

    def then(self, later: Growth) -> Growth:
        """Both, in order; what the token is, the first says."""
        text, reasoning = self.text + later.text, self.reasoning + later.reasoning
        return Growth(text, reasoning, self.is_content, self.calls + later.calls)


class Pipeline(Protocol):
    """One request's way from tokens to the channels of its answer: a function of the tokens alone."""

    stopped: bool
    """A stop string was met, or the one call was whole that there may be: nothing more will be given out."""
    reasoning_tokens: int
    """How many of the tokens pushed are thoughts."""
    has_called: bool
    """A tool was called, and the call is whole."""

    @property
    def stop_string(self) -> str:
        """The stop string that was met; empty: none was."""

    def push(self, token: int) -> Growth:
        """What this token completes: whole characters, nothing that may yet be a marker or a stop string."""

    def flush(self) -> Growth:
        """What was held back, once no token follows."""

    def spell(self, token: int) -> bytes:
        """The bytes a token stands for, whatever was pushed: for reports of log-probabilities."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a token was, drawn or of a prompt, by the model alone: before bias, penalties, filters and
    temperature.

    `top`: the most likely tokens with theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Targets:
    """What is asked of a chunk of a prompt: how likely `tokens` are, which follow its last positions, one for
    each, and which `top` tokens are the likeliest there."""

    tokens: tuple[int, ...]
    top: int


NO_TARGETS: Mapping[str, Targets] = {}


class Drawn(NamedTuple):
    """A token of an answer, and how likely it was, if that was asked for."""

    token: int
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one decode step read: at most one token for each started row, none for one that has just joined.

    `likelihoods`: of the rows that ask for them. `failed`: rows whose grammar has failed, and why; they
    have no token, nor will have. `further`: what follows these in rows that drafts were made for.
    """

    tokens: Mapping[str, int]
    likelihoods: Mapping[str, Likelihood]
    failed: Mapping[str, Exception] = field(default_factory=dict)
    further: Mapping[str, Sequence[Drawn]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """A copy of a part of a row's caches. `payload` is the engine's own. Of a run of positions, `whole_from`:
    from which one on all layers are in it; a sliding window may have moved on."""

    payload: object
    nbytes: int
    whole_from: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A cut of the positions `first` to before `last`, of which the first `count` are used."""

    payload: object
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be there of a position for a row to go on from it. `window`: so many positions before it, in
    layers that see no further than that; 0: there are none. `has_states`: a snapshot exactly there."""

    window: int = 0
    has_states: bool = False


class Engine(Protocol):
    """Rows of one model. A row is prefilled in chunks, then decodes together with all others.

    Used by the model thread only.
    """

    shape: Shape | None
    """What must have been stored of a row to make it again; None where that cannot be done."""
    drafter: Drafter | None
    """Guesses what rows say next; who is dropped here is dropped there. None: there is none."""
    weigher: Weigher | None
    """Tells what matters of a prompt, as the drafter that it is. None: nobody does."""
    can_leave_out: bool
    """Whether parts of a prompt can be left out."""

    def look(self, picture: Picture) -> int:
        """Encode an image, wherever it stands; return the bytes that are kept of it. Returns when it is
        computed. What was looked at under its digest before is kept as it is."""

    def forget(self, digest: str) -> None:
        """Let go of what is kept of an image. Unknown ones are no error."""

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        """The row's prompt has these images: to be called before anything of it is run or restored. They are
        forgotten with the row, and copied by `fork`. Cheap: nothing is encoded here."""

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, Targets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Likelihood]]:
        """Run a chunk of the prompt of each row, in the end all of it but the last token.

        Several rows may be run together, as it pays most when all are new, or all stand at one position and
        have chunks of one length. What `targets` asks of some of them is answered, one for each token.
        The images that a chunk has a part of must be kept: see `look`. A row with images is run by itself.
        If this raises, their caches are lost: drop them.
        """

    def leave_out(self, row: str, first: int, last: int) -> None:
        """The tokens from position `first` on, where the row stands, to before `last` are not run: what
        follows stands where it would. Nothing of the row can be stored, or drafted."""

    def fork(self, row: str, copy: str) -> None:
        """`copy` begins where `row`, which is not started, stands: their prompts are equal up to there."""

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        """The row joins the batch at the next step, which feeds the last of `tokens`.

        `tokens`: its prompt, the first `prompt_tokens` of them, and what it has answered already, if it was
        preempted or resumed. All but the last have been prefilled. Cheap: nothing is computed here.
        """

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        """Feed every started row its last token; return the tokens drawn by the previous call.

        So the first token of a row is returned by the second step after its start. Rows that have ended or
        failed must be dropped before the next call.

        `drafts`: what some rows may say next, behind all that was returned of them. It is run together, and
        what of it is right is returned by this call, with the token behind it, in place of one by the next.
        Nobody's tokens are others for it.
        """

    def foresee(self, row: str, most: int) -> Foreseen:
        """With at most so many tokens, how a started row goes on behind all that was returned of it, by what
        it must say and what it is held to: to make drafts of. Runs nothing."""

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """Copies of a row's columns, for each run from one position to before another, and of its `states`,
        which are those behind all tokens it was fed. Waits for the step that is under way."""

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """A new row, prefilled up to where the last piece ends. `states`: the payload of a cut made there.
        What the row was shown holds."""

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        """A payload as it goes into a file: arrays by name, and what JSON can hold of the rest."""

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        """A payload from a file. Raises for what is no payload of this engine."""

    def drop(self, row: str) -> None:
        """Forget a row, wherever it stands. Unknown rows are no error."""

    def reset(self) -> None:
        """Forget every row, after a step that failed."""

    def cache_bytes(self) -> int:
        """Bytes held by the caches of all rows."""

    def row_bytes(self, tokens: int) -> int:
        """Bytes that the caches of one row of so many tokens will take, estimated without evaluation."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loaded model is. `batched`: rows share forward passes; else each has its own. `cache_bytes_max`:
    what memory leaves for the caches of all rows; None: not known. `fingerprint`: hexadecimal, the same for
    models whose stored caches may be taken for each other's; empty: none are. `identity`: the same, whatever
    the versions of the libraries; of two models with one identity, either goes on where the other stopped.
    `plan`: what runs it, where that is not this process alone."""

    name: str
    context_length: int
    parameters: int
    capabilities: Capabilities
    batched: bool = True
    cache_bytes_max: int | None = None
    fingerprint: str = ""
    identity: str = ""
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, as its loader hands it over on the model thread."""

    facts: Facts
    engine: Engine
    open_preparer: Callable[[int], Preparer]
    """Called once on each thread of the pool, with as much of the model's context as memory holds."""
    open_pipeline: Callable[[Prepared], Pipeline]
    """Called on the model thread, once for each request."""
    column_price: float | None = None
    """What each token that a row is fed behind the first adds to a step of it alone, in plain steps, measured
    with `drafts.PRICED_COLUMNS`. None: it was not."""


@dataclass(frozen=True, slots=True)
class EncodingModel:
    """A loaded model that answers texts with numbers; otherwise as `Model`."""

    facts: Facts
    encoder: Encoder
    open_preparer: Callable[[], TextsPreparer]


class Loader(Protocol):
    """Knows which model to load."""

    name: str
    """The model's name towards clients, known before it is loaded."""

    def load(self, progress: Progress) -> Model | EncodingModel:
        """Load and warm up, on the model thread. Raises `ModelError`."""
