"""Which worker has run prompts that begin like this one. Pure, times handed in.

Of each mark (`beginnings`) it is known which incarnations had a request with it, and when. One that has died
is not looked up any more, since no incarnation comes back; what it has written to the disk is found by those
that open the same store later: they read it when they start, and only then.

What must always hold: there are at most `MARKS_MAX` marks with `HOMES_MAX` workers each, the least recently
used go first; and nobody's text is in here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from broker.dispatch.beginnings import Beginnings
from broker.dispatch.fleet import Worker

MARKS_MAX = 32_768
"""About 15 MB, if all have one worker; two hundred and fifty of the longest conversations."""
HOMES_MAX = 8


@dataclass(frozen=True, slots=True)
class _Home:
    """`store`: where the worker writes what it keeps, by its own word; empty: nowhere. `whole`: a prompt
    ended here, and another one that gets as far goes on with it."""

    store: str
    noted_at: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """What a worker has of a prompt: a share of it, 0 to 1. `own`: another prompt whole, which it repeats or
    goes on with, and not only what both begin with."""

    share: float = 0.0
    own: bool = False


NOTHING = Known()


class Affinity:
    """Owns what is remembered; to be told of each request that goes to a worker."""

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, dict[str, _Home]] = OrderedDict()

    def __len__(self) -> int:
        """How many marks are remembered."""
        return len(self._homes)

    def note(self, prompt: Beginnings, worker: Worker, now: float) -> None:
        """A prompt that begins like this goes to this worker."""
        within, whole = _Home(worker.store, now), _Home(worker.store, now, whole=True)
        for mark, size in prompt.marks:
            homes = self._homes.setdefault(mark, {})
            before = homes.pop(worker.incarnation, within)
            homes[worker.incarnation] = whole if before.whole or size == prompt.size else within
            if len(homes) > HOMES_MAX:
                del homes[next(iter(homes))]
            self._homes.move_to_end(mark)
        while len(self._homes) > MARKS_MAX:
            self._homes.popitem(last=False)

    def known(self, prompt: Beginnings, worker: Worker) -> Known:
        """What of such a prompt this worker has probably run, or can read."""
        for mark, size in reversed(prompt.marks):
            if (homes := self._homes.get(mark)) and (home := _home(homes, worker)):
                return Known(size / prompt.size, home.whole)
        return NOTHING

    def forget(self, incarnation: str) -> None:
        """This worker keeps nothing any more."""
        for mark in [
            mark for mark, homes in self._homes.items() if homes.pop(incarnation, None) and not homes
        ]:
            del self._homes[mark]


def _home(homes: Mapping[str, _Home], worker: Worker) -> _Home | None:
    """Its own, or one whose files it has found when it started."""
    if worker.incarnation in homes or not worker.store:
        return homes.get(worker.incarnation)
    found = [home for home in homes.values() if home.store == worker.store and home.noted_at < worker.met_at]
    return max(found, key=lambda home: home.whole, default=None)
