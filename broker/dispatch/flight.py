"""Flight: a request in flight at the gateway. Pure: no sockets, no asyncio; the clock is injected.

A flight is opened when its request is admitted and closed when its client has everything or has left. In
between it collects the workers' output, in order, up to the one terminal item. Each dispatch to a worker is
an `Attempt` with a unique id, which continues after the tokens of the attempts before it. Invariants:

* exactly one terminal item per flight (`Finished` or `Failed`), nothing after it;
* prompt logprobs are delivered once, in order, and all of them before the first delta;
* an attempt's deltas are numbered 0, 1, 2…; duplicates are dropped, and nothing is accepted after a gap;
* the prefix hit is delivered once, after `Accepted` and before the first delta;
* only messages of the present attempt's worker, with its id, are accepted; all others are dropped;
* each text of an embedding or rerank request is answered once, in whichever attempt;
* output waiting for a slow client is bounded (prompt logprobs by the prompt's length), and so are the tokens
  that are kept for failover.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from broker.dispatch.prefix_hashes import PrefixHashes
from protocol.errors import Code
from protocol.messages import (
    Accepted,
    EmbeddingChunk,
    Encode,
    Failed,
    Finished,
    Generate,
    PrefixHit,
    PromptLogprobs,
    Request,
)
from protocol.packed_texts import FLOAT_BYTES
from protocol.types import BATCH_PRIORITY, Delta, PrefixReuse, Timings

PENDING_DELTAS_MAX = 1536
"""Maximum of pending deltas, besides the thousands in the sockets' buffers. One with a long text or logprobs
counts as several, so that together they take at most half a megabyte."""
LONG_S = 60.0
"""Time of generation after which an answer without a maximum of tokens is logged."""
_DELTA_BYTES, _LIKELY_BYTES, _CALL_BYTES = 320, 160, 160
"""Estimated memory of a plain delta, and in addition of a top logprob and of a tool-call delta."""
PHASES_MAX = 32
"""Maximum of recorded phases of a flight; after them the last one counts until its end."""
TOKENS_MAX = 2**24
"""Upper bound of an answer's tokens if neither the request nor the worker sets a lower one."""
PROVEN_PIECES = 2
"""Number of deltas or prompt-logprob messages after which an attempt has passed the point where the previous
one ended. One is not enough: a dying worker's last messages are lost, and may be as many."""

Item = Accepted | PrefixHit | PromptLogprobs | Delta | EmbeddingChunk | Finished | Failed
Batch = tuple[int, list[Item]]
"""Output of one of a request's flights: its index among them, and the items."""


class DeltaResult(Enum):
    """Outcome of accepting a delta."""

    TAKEN = auto()
    DUPLICATE = auto()
    GAP = auto()
    EXCESS = auto()
    """It exceeds what the request can have, such as `tokens_max`."""
    OVER = auto()
    """The flight has ended, perhaps because of this delta; the worker should stop."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch of a flight to a worker. `id`: the request's id at that worker."""

    id: str
    worker: str
    began_at: float
    accepted: bool = False
    reused: bool = False
    deltas: int = 0
    scored: int = 0
    """Number of prompt-logprob messages."""
    spared: float = 0.0
    """Share of its prompt that its worker has probably cached, as estimated at dispatch."""
    missed_heartbeats: int = 0
    """Consecutive heartbeats that should have listed it and did not."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request in flight. `take` returns the output that has arrived."""

    request: Request
    model: str
    """The requested name; `identity` and `plan` are the last worker's."""
    opened_at: float
    waiting_since: float
    """Time since when it waits for a worker, if it has no `attempt`."""
    media: Sequence[bytes] = ()
    key: str = ""
    """Name of the API key that sent it; empty without keys."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Each phase with its start: `queued`, then for each attempt `preparing`, `waiting`, `prefill` and
    `decode`; `paused` between two."""
    attempt: Attempt | None = None
    """The present attempt; None while it waits for a worker."""
    attempts: int = 0
    """Number of attempts so far."""
    resends: int = 0
    """Resends in a row, without a token in between, because messages were lost."""
    starved_by: str = ""
    """The worker that has made no progress with it since its last token, although it ran."""
    prefix_hashes: PrefixHashes | None = None
    """Of the prompt; computed on first use."""
    identity: str = ""
    """Identity of the model of the last attempt."""
    plan: str = ""
    """Plan of the worker of the last attempt."""
    continued_by: str = ""
    """The last plan that continued another one's answer."""
    relaxed: Sequence[str] = ()
    """Keywords of its JSON schema that the answer may violate."""
    tokens_max: int = TOKENS_MAX
    """Limit of its tokens at the present worker."""
    tokens: list[int] = field(default_factory=list)
    """Tokens delivered or pending, at most `tokens_max`."""
    accepted: bool = False
    """Whether a worker has accepted it."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 or an estimate until a worker has counted them."""
    scored: int = 0
    """Number of prompt tokens with logprobs."""
    answered: set[int] = field(default_factory=set)
    """Indices of the texts whose vectors have arrived."""
    reuse: PrefixReuse | None = None
    """The prefix hit that was delivered."""
    started_at: float | None = None
    """Time of its first output."""
    terminal: Finished | Failed | None = None
    """Its end; None until then."""
    on_item: Callable[[], None] = lambda: None
    """Called for each item that arrives."""
    pending: list[Item] = field(default_factory=list)
    """Items that `take` has not returned yet."""
    is_collected: bool = False
    """Whether `take` follows soon, so that `pending` needs no bound."""
    unread_since: float | None = None
    """Time since when its client has to read before more can be sent; None if it need not."""
    pending_excess: int = 0
    """Additional count of pending deltas, for large ones."""
    group: str = ""
    """Names the request of its client, which has a flight for each choice."""
    crash_count: int = 0
    """Crashes of workers that it was on, since its last progress."""
    crashed_on: str = ""
    """The worker whose crash was counted last."""
    is_long: bool = False
    """Whether its length has been logged."""
    epoch: str = ""
    """Name of the gateway that restored it from a checkpoint; empty: it was opened here."""
    restores: int = 0
    """Restorations since it had reached `restored_at`."""
    restored_at: int = 0
    """Its progress at the last restoration."""
    adapter_digest: str = ""
    """Digest of its adapter at the last worker."""
    was_placed: bool = False
    """Whether it was dispatched to a worker by this gateway."""
    former: Attempt | None = None
    """While it waits: the attempt whose connection was lost, which its worker may still run."""
    adoptable_until: float = 0.0
    """Time until which it waits for the worker of that attempt rather than for any."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_batch(self) -> bool:
        """Whether it is a line of a batch, which may wait for as long as there are other requests."""
        return self.request.priority >= BATCH_PRIORITY

    def becomes_long(self, now: float) -> bool:
        """Return, once, whether it has generated for `LONG_S` without a maximum of tokens."""
        generated_s = 0.0 if self.started_at is None else now - self.started_at
        if self.is_long or self.terminal is not None or generated_s < LONG_S:
            return False
        self.is_long = True
        return isinstance(self.request, Generate) and self.request.max_tokens is None

    @property
    def is_suspect(self) -> bool:
        """Whether it may be the cause of a crash."""
        return self.crash_count > 0

    @property
    def proven(self) -> bool:
        """Whether the present attempt has passed the point where the previous one ended."""
        return self.attempt is not None and self.attempt.deltas + self.attempt.scored >= PROVEN_PIECES

    @property
    def progress(self) -> int:
        """Number of tokens, or of answered texts."""
        return len(self.tokens) + len(self.answered)

    @property
    def is_scored(self) -> bool:
        """Whether all requested prompt logprobs have arrived."""
        request = self.request
        if not isinstance(request, Generate) or request.sampling.logprobs is None:
            return True
        return not request.echo or (self.accepted and self.scored >= self.prompt_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether any output or prompt logprobs have arrived."""
        return self.scored + self.progress > 0

    @property
    def adapter(self) -> str:
        """Name of the adapter that it uses; empty: none."""
        return self.request.adapter if isinstance(self.request, Generate) else ""

    def fits_adapter(self, digest: str | None) -> bool:
        """Return whether a worker whose adapter of that name has this digest can take it; None: it has no
        such adapter."""
        return digest is not None and (not self.has_begun or digest == self.adapter_digest)

    def can_continue_on(self, identity: str, *, stands_in: bool = False) -> bool:
        """Return whether a model with this identity can continue this flight.

        An empty identity, of a worker of an earlier version, always matches; so does any with `stands_in`.
        """
        if stands_in or not (self.has_begun and self.identity and identity):
            return True
        return self.identity == identity

    def set_model(self, identity: str, plan: str) -> None:
        """Record the identity and plan of the worker that it is dispatched to."""
        if self.has_begun and (self.identity, self.plan) != (identity, plan):
            self.continued_by = plan or "one process alone"
        self.identity, self.plan = identity, plan

    def limit(self, context_length: int) -> None:
        """Set `tokens_max` for the present worker; `context_length`: 0 if unknown."""
        asked = self.request.max_tokens if isinstance(self.request, Generate) else None
        self.tokens_max = min(limit for limit in (asked, context_length, TOKENS_MAX) if limit)

    def enter(self, phase: str, now: float) -> None:
        """Record the start of a phase."""
        if len(self.phases) < PHASES_MAX:
            self.phases.append((phase, now))

    def take(self) -> list[Item]:
        """Return all items since the last call, in order; the terminal item is last."""
        items, self.pending = self.pending, []
        self.pending_excess = 0
        return items

    def _push(self, item: Item) -> None:
        self.pending.append(item)
        self.on_item()

    def _advance(self, item: PromptLogprobs | Delta | EmbeddingChunk, attempt: Attempt, now: float) -> None:
        """Deliver progress, which resets the counters of failures."""
        if self.started_at is None:
            self.started_at = now
        self.resends, self.starved_by = 0, ""
        self.record(item, attempt)
        self._push(item)

    def record(self, item: Item, attempt: Attempt) -> None:
        """Record output of an attempt, when it is delivered or read back."""
        if isinstance(item, Delta):  # the most frequent one, and a match of classes takes twice as long
            self.tokens += item.tokens
            attempt.deltas += 1
            return
        match item:
            case Accepted():
                self.prompt_tokens, self.relaxed = item.prompt_tokens, item.relaxed
                self.accepted = attempt.accepted = True
            case PrefixHit():
                self.reuse = item.reuse
                attempt.reused = True
            case PromptLogprobs():
                self.scored += len(item.tokens)
                attempt.scored += 1
            case EmbeddingChunk():
                self.answered.update(item.places)
                attempt.deltas += 1

    def accept(self, message: Accepted) -> bool:
        """Record that the worker has accepted the request. Return whether it is the first to do so."""
        if self.terminal is not None or self.attempt is None:
            return False
        self.attempt.accepted = True
        if self.accepted:
            return False
        self.record(message, self.attempt)
        self._push(message)
        return True

    def reused(self, message: PrefixHit) -> bool:
        """Record the prefix hit of the present attempt. Return False if the message is out of order.

        Only the first attempt's hit is delivered: later ones also reuse the flight's own answer.
        """
        attempt = self.attempt
        if (
            attempt is None
            or not attempt.accepted
            or attempt.reused
            or attempt.deltas
            or self.terminal is not None
        ):
            return False
        attempt.reused = True
        if self.reuse is None and not self.tokens:
            self.record(message, attempt)
            self._push(message)
        return True

    def score(self, message: PromptLogprobs, now: float) -> DeltaResult:
        """Accept logprobs of the next prompt tokens."""
        if self.terminal is not None or self.attempt is None:
            return DeltaResult.OVER
        if message.first != self.scored or not self.accepted:
            return DeltaResult.DUPLICATE if message.first < self.scored else DeltaResult.GAP
        self._advance(message, self.attempt, now)
        return DeltaResult.TAKEN

    def accept_delta(self, delta: Delta | EmbeddingChunk, now: float) -> DeltaResult:
        """Accept the next delta of the present attempt, or vectors or scores of further texts."""
        attempt, request = self.attempt, self.request
        if self.terminal is not None or attempt is None:
            return DeltaResult.OVER
        if delta.sequence != attempt.deltas:
            return DeltaResult.DUPLICATE if delta.sequence < attempt.deltas else DeltaResult.GAP
        if not isinstance(request, Generate):
            if not isinstance(delta, EmbeddingChunk) or not _is_sound(delta, request.count, self.answered):
                return DeltaResult.EXCESS
        elif not isinstance(delta, Delta):
            return DeltaResult.EXCESS
        elif request.echo and not self.is_scored:
            return DeltaResult.GAP
        # Workers send no deltas without tokens, but those must be bounded too.
        elif attempt.deltas >= self.tokens_max or len(self.tokens) + len(delta.tokens) > self.tokens_max:
            return DeltaResult.EXCESS
        elif not self.is_collected and len(self.pending) + self.pending_excess >= PENDING_DELTAS_MAX:
            self.fail(Code.CLIENT_TOO_SLOW)
            return DeltaResult.OVER
        else:
            self.pending_excess += size_of(delta) // _DELTA_BYTES
        self._advance(delta, attempt, now)
        return DeltaResult.TAKEN

    def lacks(self, finished: Finished) -> bool:
        """Return whether a part of the answer was lost before its end."""
        if isinstance(self.request, Encode):
            return len(self.answered) < self.request.count
        return finished.usage.completion_tokens > len(self.tokens) or not self.is_scored

    def end(self, terminal: Finished | Failed) -> bool:
        """End the flight; the only place that does. Return False if it had ended already."""
        if self.terminal is not None:
            return False
        if isinstance(terminal, Finished) and self.attempts > 1:
            # The timings are those of the last attempt alone.
            terminal = replace(self._without_own_reuse(terminal), timings=Timings())
        if isinstance(terminal, Finished):
            terminal = replace(terminal, continued_by=self.continued_by)
        self.terminal = terminal
        self._push(terminal)
        return True

    def _without_own_reuse(self, finished: Finished) -> Finished:
        """Correct `cached_tokens`: later attempts may hit tokens that earlier ones generated."""
        usage = finished.usage
        cached = self.reuse.tokens if self.reuse else min(usage.cached_tokens, usage.prompt_tokens)
        return replace(finished, usage=replace(usage, cached_tokens=cached))

    def fail(self, code: Code, message: str = "") -> bool:
        """End the flight with an error of the gateway."""
        sender = self.request.incarnation
        return self.end(Failed(incarnation=sender, id=self.id, code=code, message=message))


def _is_sound(message: EmbeddingChunk, count: int, answered: Collection[int]) -> bool:
    """Return whether the chunk is for existing, unanswered texts, with vectors of equal length."""
    places = set(message.places)
    numbers, rest = divmod(len(message.vectors), FLOAT_BYTES * max(1, len(places)))
    is_whole = len(places) == len(message.places) and numbers > 0 and not rest
    return is_whole and places.isdisjoint(answered) and max(places, default=count) < count


def size_of(delta: Delta) -> int:
    """Estimate the memory of a delta in bytes, beyond that of a plain one."""
    size = len(delta.text) + len(delta.reasoning)
    for call in delta.calls:
        size += _CALL_BYTES + len(call.id) + len(call.name) + len(call.arguments)
    for each in delta.likelihoods:
        size += _LIKELY_BYTES * (1 + len(each.top)) + len(each.bytes)
        size += sum(len(token) for token, _ in each.top)
    return size
