"""Checkpoint: what a flight needs to continue after the gateway's death, as a value that can be stored. Pure.

`checkpoint_of` takes one from a flight, `flight_of` makes the flight again in another dispatcher (see
`Dispatcher.restore`). The worker that gets the flight next replays `tokens` through its output processor, so
neither text nor text that was held back is stored. Between two checkpoints only these fields change with the
output, so a journal may keep them itself and put them in with `msgspec.structs.replace`:

* an `Accepted` sets `accepted`, `prompt_tokens` and `relaxed`, and a `PrefixHit` sets `reuse`;
* a `Delta` adds its `tokens`, and one to `attempt.deltas`;
* `PromptLogprobs` add the number of their tokens to `scored`, and one to `attempt.scored`;
* an `EmbeddingChunk` adds its `places` to `answered`, and one to `attempt.deltas`.

All others change when the flight is dispatched, loses its worker, or is restored: take a new checkpoint then.
One that is behind costs repeated work and no text: the missing tokens are generated again, with the same
result, because the random number of a position depends only on the seed and that position.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.dispatch.flight import TOKENS_MAX, Attempt, Flight
from protocol.errors import Code
from protocol.messages import Request
from protocol.types import Count, Id, Name, PrefixReuse, Seconds, Token

RESTORES_MAX = 8
"""Maximum restorations of a flight in a row without progress in between. A request that ends its gateway
would do so for ever."""
RESTORED_TOO_OFTEN = "The gateway ended repeatedly while this request made no progress."


ADOPTION_S_MAX = 3.0
"""Time that a restored flight waits for the worker that was running it; then any worker gets it. Workers
connect again within a second."""


class AttemptRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The attempt that was running, as in `flight.Attempt`; `worker` may still run it."""

    id: Id
    worker: Id
    accepted: bool = False
    reused: bool = False
    deltas: Count = 0
    scored: Count = 0


class Checkpoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A flight that has not ended. Fields are those of `Flight`; `age_s`: seconds since it was opened.

    `request` is the admitted one, with its resolved seed. `attempt`: None while the flight waited for a
    worker. `restores`: number of restorations since `restored_at`, the progress at the last one.
    """

    request: Request
    model: Name
    age_s: Seconds = 0.0
    key: Name = ""
    attempts: Count = 0
    attempt: AttemptRecord | None = None
    identity: str = ""
    plan: str = ""
    continued_by: str = ""
    accepted: bool = False
    prompt_tokens: Count = 0
    relaxed: list[Name] = []
    tokens_max: Count = TOKENS_MAX
    tokens: list[Token] = []
    scored: Count = 0
    answered: list[Count] = []
    reuse: PrefixReuse | None = None
    crash_count: Count = 0
    restores: Count = 0
    restored_at: Count = 0
    adapter_digest: Name = ""

    @property
    def reached(self) -> int:
        """The flight's progress, with the prompt tokens that have logprobs."""
        return self.scored + len(self.tokens) + len(self.answered)


def checkpoint_of(flight: Flight, now: float) -> Checkpoint:
    """Return the checkpoint of an unfinished flight."""
    attempt = flight.attempt
    return Checkpoint(
        request=flight.request,
        model=flight.model,
        age_s=max(0.0, now - flight.opened_at),
        key=flight.key,
        attempts=flight.attempts,
        attempt=None if attempt is None else record_of(attempt),
        identity=flight.identity,
        plan=flight.plan,
        continued_by=flight.continued_by,
        accepted=flight.accepted,
        prompt_tokens=flight.prompt_tokens,
        relaxed=list(flight.relaxed),
        tokens_max=flight.tokens_max,
        tokens=list(flight.tokens),
        scored=flight.scored,
        answered=sorted(flight.answered),
        reuse=flight.reuse,
        crash_count=flight.crash_count,
        restores=flight.restores,
        restored_at=flight.restored_at,
        adapter_digest=flight.adapter_digest,
    )


def record_of(attempt: Attempt) -> AttemptRecord:
    """Return the record of an attempt."""
    return AttemptRecord(
        id=attempt.id,
        worker=attempt.worker,
        accepted=attempt.accepted,
        reused=attempt.reused,
        deltas=attempt.deltas,
        scored=attempt.scored,
    )


def attempt_of(record: AttemptRecord, now: float) -> Attempt:
    """Return the attempt of a record."""
    return Attempt(
        record.id,
        record.worker,
        began_at=now,
        accepted=record.accepted,
        reused=record.reused,
        deltas=record.deltas,
        scored=record.scored,
    )


def flight_of(
    checkpoint: Checkpoint, media: Sequence[bytes], now: float, elapsed_s: float, incarnation: str
) -> Flight:
    """Return the flight of a checkpoint that was taken `elapsed_s` ago, for the gateway `incarnation`.

    It waits for a worker, or has failed because it was restored too often.
    """
    has_advanced = checkpoint.reached > checkpoint.restored_at
    flight = Flight(
        replace(checkpoint.request, incarnation=incarnation),
        checkpoint.model,
        opened_at=now - checkpoint.age_s - elapsed_s,
        waiting_since=now,
        media=media,
        key=checkpoint.key,
        attempts=checkpoint.attempts,
        epoch=incarnation[:8],
        crash_count=checkpoint.crash_count,
        restores=1 if has_advanced else checkpoint.restores + 1,
        restored_at=checkpoint.reached,
        identity=checkpoint.identity,
        plan=checkpoint.plan,
        continued_by=checkpoint.continued_by,
        relaxed=checkpoint.relaxed,
        tokens_max=checkpoint.tokens_max,
        tokens=list(checkpoint.tokens),
        accepted=checkpoint.accepted,
        prompt_tokens=checkpoint.prompt_tokens,
        scored=checkpoint.scored,
        answered=set(checkpoint.answered),
        reuse=checkpoint.reuse,
        adapter_digest=checkpoint.adapter_digest,
    )
    flight.enter("paused", now)
    if checkpoint.attempt is not None:
        flight.former = attempt_of(checkpoint.attempt, now)
        flight.adoptable_until = now + ADOPTION_S_MAX
    if flight.restores > RESTORES_MAX:
        flight.fail(Code.INTERNAL_ERROR, RESTORED_TOO_OFTEN)
    return flight
