"""A request in flight. Pure: no sockets, no asyncio, the clock handed in.

A flight is opened when its request is admitted and closed when its client has what it wanted or is gone. In
between it collects what workers say, in order, until the one terminal item. It flies in legs: each is one
sending of its request to one worker, under an id that no other leg has, and each goes on behind the tokens of
the legs before it. What must always hold:

* exactly one terminal item per flight (`Finished` or `Failed`), nothing after it;
* what is asked of a prompt's tokens is said once, in order, and all of it before the first delta;
* a leg's deltas are numbered 0, 1, 2…; a double is dropped, behind a gap nothing of that leg is taken;
* what was reused of its prompt is said once, after its acceptance and before its first delta;
* a flight listens to the worker and to the id of its present leg; whatever else speaks of it is dropped;
* of texts that are answered with numbers each is answered once, whatever leg it is in;
* what waits for a client that does not read is bounded, what is said of its prompt by the prompt, and so are
  its tokens, which are kept to fly on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from broker.dispatch.beginnings import Beginnings
from protocol.errors import Code
from protocol.messages import (
    Accepted,
    Encode,
    Encoded,
    Failed,
    Finished,
    Generate,
    Request,
    Reused,
    Scored,
)
from protocol.parts import Delta, Reuse
from protocol.texts import FLOAT_BYTES

PENDING_DELTAS_MAX = 1536
"""Beyond what lies in the sockets' buffers, thousands of them. One with a long text, or with
log-probabilities, counts as several, so that all of them take half a megabyte."""
_DELTA_BYTES, _LIKELY_BYTES, _CALL_BYTES = 320, 160, 160
"""What a plain one takes in memory, and beyond that one of its most likely tokens, and a growth of a call."""
TOKENS_MAX = 2**24
"""Of an answer, where neither its request nor its worker says less."""
PROVEN_PIECES = 2
"""So many deltas of a leg, or messages about its prompt, show that its request has got past what was the end
of the leg before. One is not enough: the last words of a worker that dies are lost with it, and they may have
been as many."""

Item = Accepted | Reused | Scored | Delta | Encoded | Finished | Failed
Batch = tuple[int, list[Item]]
"""What has come for one of a request's flights: its place among them, and the items."""


class Gain(Enum):
    """What became of a delta."""

    TAKEN = auto()
    DOUBLE = auto()
    GAP = auto()
    BEYOND = auto()
    """There was no room for so many tokens."""
    OVER = auto()
    """The flight has ended, perhaps over this delta: the worker should stop."""


@dataclass(slots=True, eq=False)
class Leg:
    """One sending of a flight's request. `id`: what its worker calls it."""

    id: str
    worker: str
    began_at: float
    accepted: bool = False
    reused: bool = False
    deltas: int = 0
    scored: int = 0
    """Messages about its prompt's tokens."""
    spared: float = 0.0
    """The share of its prompt that its worker has probably run before, as far as was known when it began."""
    beats_missed: int = 0
    """Heartbeats in a row that should have named it and did not."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request in the air. `take` hands over what has arrived; `on_item` is called when something has.

    `leg` is None while it waits for a worker, which it does since `waiting_since`. `tokens`: those that the
    client has, or can take, `tokens_max` as many as there can be, and `scored` the number of its prompt's
    whose likelihoods it has. `prompt_tokens`: until a worker has counted them, 0 or a guess. `mends`: how
    often in a row, without a token in between, it was sent again because something was lost on the line.
    `answered`: the places of its texts that the client has the numbers of.
    `suspect`: it was aboard a worker that died. `fingerprint`: of its request, once somebody has asked for
    it, and `beginnings` of its prompt. `identity`: of the model that it was aboard last; `model` is only the
    name that was asked for. `plan`: of that worker. `continued_by`: the last plan that went on with what
    another one had begun.
    """

    request: Request
    model: str
    opened_at: float
    waiting_since: float
    media: Sequence[bytes] = ()
    leg: Leg | None = None
    legs: int = 0
    mends: int = 0
    suspect: bool = False
    fingerprint: bytes = b""
    beginnings: Beginnings | None = None
    identity: str = ""
    plan: str = ""
    continued_by: str = ""
    tokens_max: int = TOKENS_MAX
    tokens: list[int] = field(default_factory=list)
    accepted: bool = False
    prompt_tokens: int = 0
    scored: int = 0
    answered: set[int] = field(default_factory=set)
    reuse: Reuse | None = None
    started_at: float | None = None
    terminal: Finished | Failed | None = None
    on_item: Callable[[], None] = lambda: None
    pending: list[Item] = field(default_factory=list)
    pending_excess: int = 0
    """As many deltas more are pending, for their size."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def proven(self) -> bool:
        """Its present leg has shown that it does not end where another one did."""
        return self.leg is not None and self.leg.deltas + self.leg.scored >= PROVEN_PIECES

    @property
    def progress(self) -> int:
        """How many tokens, or texts, it has got."""
        return len(self.tokens) + len(self.answered)

    @property
    def reached(self) -> int:
        """The same, with what it has of its prompt: how far it has come."""
        return self.scored + self.progress

    @property
    def is_scored(self) -> bool:
        """It has the likelihoods of its whole prompt, or asks for none."""
        request = self.request
        if not isinstance(request, Generate) or request.sampling.logprobs is None:
            return True
        return not request.echo or (self.accepted and self.scored >= self.prompt_tokens)

    @property
    def has_begun(self) -> bool:
        """Its client has something of its answer, or of what is told of its prompt."""
        return self.reached > 0

    def goes_on_with(self, identity: str, *, stands_in: bool = False) -> bool:
        """Whether the model with this identity can finish what this flight has got. Empty: its worker is of
        an earlier version and does not say; then the name counts. `stands_in`: whatever it is, it may."""
        if stands_in or not (self.has_begun and self.identity and identity):
            return True
        return self.identity == identity

    def flies_by(self, identity: str, plan: str) -> None:
        """It is aboard a worker with such a model, run by such a plan."""
        if self.has_begun and (self.identity, self.plan) != (identity, plan):
            self.continued_by = plan or "one process alone"
        self.identity, self.plan = identity, plan

    def limit(self, context_length: int) -> None:
        """What it can get from the worker it is aboard now; 0: that one does not say."""
        asked = self.request.max_tokens if isinstance(self.request, Generate) else None
        self.tokens_max = min(limit for limit in (asked, context_length, TOKENS_MAX) if limit)

    def take(self) -> list[Item]:
        """Everything that arrived since the last call, in order; the terminal item comes last."""
        items, self.pending = self.pending, []
        self.pending_excess = 0
        return items

    def _push(self, item: Item) -> None:
        self.pending.append(item)
        self.on_item()

    def accept(self, message: Accepted) -> bool:
        """Its present leg is well-formed. Whether that is news to the client."""
        if self.terminal is not None or self.leg is None:
            return False
        self.leg.accepted = True
        if self.accepted:
            return False
        self.accepted = True
        self.prompt_tokens = message.prompt_tokens
        self._push(message)
        return True

    def reused(self, message: Reused) -> bool:
        """How much of the prompt need not be computed. False when this is not the time to say it.

        The client is told of the first leg that said so: what later ones reuse is its own answer too.
        """
        leg = self.leg
        if leg is None or not leg.accepted or leg.reused or leg.deltas or self.terminal is not None:
            return False
        leg.reused = True
        if self.reuse is None and not self.tokens:
            self.reuse = message.reuse
            self._push(message)
        return True

    def score(self, message: Scored, now: float) -> Gain:
        """How likely the next tokens of the prompt are."""
        if self.terminal is not None or self.leg is None:
            return Gain.OVER
        if message.first != self.scored or not self.accepted:
            return Gain.DOUBLE if message.first < self.scored else Gain.GAP
        if self.started_at is None:
            self.started_at = now
        self.mends = 0
        self.leg.scored += 1
        self.scored += len(message.tokens)
        self._push(message)
        return Gain.TAKEN

    def gain(self, delta: Delta, now: float) -> Gain:
        """One more delta of the present leg."""
        leg = self.leg
        if self.terminal is not None or leg is None:
            return Gain.OVER
        if delta.sequence != leg.deltas:
            return Gain.DOUBLE if delta.sequence < leg.deltas else Gain.GAP
        if not isinstance(self.request, Generate):
            return Gain.BEYOND
        if self.request.echo and not self.is_scored:
            return Gain.GAP
        # A delta without a token is none that a worker sends, and must not be free.
        if leg.deltas >= self.tokens_max or len(self.tokens) + len(delta.tokens) > self.tokens_max:
            return Gain.BEYOND
        if len(self.pending) + self.pending_excess >= PENDING_DELTAS_MAX:
            self.fail(Code.CLIENT_TOO_SLOW)
            return Gain.OVER
        if self.started_at is None:
            self.started_at = now
        leg.deltas += 1
        self.mends = 0
        self.tokens += delta.tokens
        self.pending_excess += size_of(delta) // _DELTA_BYTES
        self._push(delta)
        return Gain.TAKEN

    def encode(self, message: Encoded, now: float) -> Gain:
        """The numbers of some more of its texts."""
        leg, request = self.leg, self.request
        if self.terminal is not None or leg is None:
            return Gain.OVER
        if message.sequence != leg.deltas:
            return Gain.DOUBLE if message.sequence < leg.deltas else Gain.GAP
        if not isinstance(request, Encode) or not _is_sound(message, request.count, self.answered):
            return Gain.BEYOND
        if self.started_at is None:
            self.started_at = now
        leg.deltas += 1
        self.mends = 0
        self.answered.update(message.places)
        self._push(message)
        return Gain.TAKEN

    def lacks(self, finished: Finished) -> bool:
        """Something of this answer was lost before its end."""
        if isinstance(self.request, Encode):
            return len(self.answered) < self.request.count
        return finished.usage.completion_tokens > len(self.tokens) or not self.is_scored

    def end(self, terminal: Finished | Failed) -> bool:
        """The one place where a flight ends. False when it had ended already."""
        if self.terminal is not None:
            return False
        if isinstance(terminal, Finished) and self.legs > 1:
            terminal = self._without_own_reuse(terminal)
        if isinstance(terminal, Finished):
            terminal = replace(terminal, continued_by=self.continued_by)
        self.terminal = terminal
        self._push(terminal)
        return True

    def _without_own_reuse(self, finished: Finished) -> Finished:
        """A later leg may have found the tokens of an earlier one: no cache hit of the client's."""
        usage = finished.usage
        cached = self.reuse.tokens if self.reuse else min(usage.cached_tokens, usage.prompt_tokens)
        return replace(finished, usage=replace(usage, cached_tokens=cached))

    def fail(self, code: Code, message: str = "") -> bool:
        """End with an error of the gateway's own."""
        sender = self.request.incarnation
        return self.end(Failed(incarnation=sender, id=self.id, code=code, message=message))


def _is_sound(message: Encoded, count: int, answered: Collection[int]) -> bool:
    """News of texts that there are, with equally many numbers for each."""
    places = set(message.places)
    numbers, rest = divmod(len(message.vectors), FLOAT_BYTES * max(1, len(places)))
    is_whole = len(places) == len(message.places) and numbers > 0 and not rest
    return is_whole and places.isdisjoint(answered) and max(places, default=count) < count


def size_of(delta: Delta) -> int:
    """About as many bytes as it takes in memory beyond those of a plain one."""
    size = len(delta.text) + len(delta.reasoning)
    for call in delta.calls:
        size += _CALL_BYTES + len(call.id) + len(call.name) + len(call.arguments)
    for each in delta.likelihoods:
        size += _LIKELY_BYTES * (1 + len(each.top)) + len(each.bytes)
        size += sum(len(token) for token, _ in each.top)
    return size
