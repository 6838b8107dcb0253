"""Checkpoint: what a flight needs to continue after the gateway's death, beside its output. Pure.

`checkpoint_of` takes one from a flight, `flight_of` makes the flight again in another dispatcher (see
`Dispatcher.restore`) from it and the output that was delivered. The worker that gets the flight next replays
its tokens through its output processor, so text that was held back is not needed.

All fields change only when the flight is dispatched, loses its worker, or is restored: take a new checkpoint
then. Output that is missing costs repeated work and no text: its tokens are generated again, with the same
result, because the random number of a position depends only on the seed and that position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.dispatch.flight import TOKENS_MAX, Attempt, Flight, Item
from protocol.errors import Code
from protocol.messages import Request
from protocol.types import Count, Id, Name, Seconds

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
    tokens_max: Count = TOKENS_MAX
    crash_count: Count = 0
    restores: Count = 0
    restored_at: Count = 0
    adapter_digest: Name = ""


def checkpoint_of(flight: Flight, now: float) -> Checkpoint:
    """Return the checkpoint of an unfinished flight."""
    attempt = flight.attempt
    return Checkpoint(
        request=flight.request,
        model=flight.model,
        age_s=max(0.0, now - flight.opened_at),
        key=flight.key,
        attempts=flight.attempts,
        attempt=None if attempt is None else AttemptRecord(id=attempt.id, worker=attempt.worker),
        identity=flight.identity,
        plan=flight.plan,
        continued_by=flight.continued_by,
        tokens_max=flight.tokens_max,
        crash_count=flight.crash_count,
        restores=flight.restores,
        restored_at=flight.restored_at,
        adapter_digest=flight.adapter_digest,
    )


def flight_of(
    checkpoint: Checkpoint,
    output: Iterable[Item],
    media: Sequence[bytes],
    now: float,
    elapsed_s: float,
    incarnation: str,
) -> Flight:
    """Return the flight of a checkpoint that was taken `elapsed_s` ago, for the gateway `incarnation`.

    It waits for a worker, or has failed because it was restored too often.
    """
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
        identity=checkpoint.identity,
        plan=checkpoint.plan,
        continued_by=checkpoint.continued_by,
        tokens_max=checkpoint.tokens_max,
        adapter_digest=checkpoint.adapter_digest,
    )
    flight.enter("paused", now)
    former = earlier = Attempt("", "", began_at=now)
    if (attempt := checkpoint.attempt) is not None:
        flight.former = former = Attempt(attempt.id, attempt.worker, began_at=now)
        flight.adoptable_until = now + ADOPTION_S_MAX
    for item in output:
        flight.record(item, former if item.id == former.id else earlier)
    flight.restored_at = flight.scored + flight.progress
    flight.restores = 1 if flight.restored_at > checkpoint.restored_at else checkpoint.restores + 1
    if flight.restores > RESTORES_MAX:
        flight.fail(Code.INTERNAL_ERROR, RESTORED_TOO_OFTEN)
    return flight
