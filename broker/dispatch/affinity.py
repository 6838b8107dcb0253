"""Prefix affinity: which workers have computed a prefix of a prompt. Pure; times are injected.

For each prefix hash (`PrefixHashes.hashes`) the incarnations that had a request with it are recorded, with
the time. A dead incarnation never matches again. Its prefixes on disk count for workers that open the same
store later, because a worker reads the store only when it starts.

Invariants: at most `HASHES_MAX` hashes with `HOMES_MAX` workers each, evicted least recently used first. No
text of a prompt is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from broker.dispatch.fleet import Worker
from broker.dispatch.prefix_hashes import PrefixHashes

HASHES_MAX = 32_768
"""About 15 MB with one worker each; enough for 250 of the longest conversations."""
HOMES_MAX = 8


@dataclass(frozen=True, slots=True)
class _Home:
    """A worker that has computed a prefix. `store`: its prefix store on disk, as it reports; empty if none.

    `whole`: a prompt ended here, so a longer prompt with this prefix continues that one.
    """

    store: str
    noted_at: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """Overlap of a prompt with a worker's prefixes: `share` of its bytes, 0 to 1.

    `own`: the overlap is a whole earlier prompt, repeated or continued by this one.
    """

    share: float = 0.0
    own: bool = False


NOTHING = PrefixOverlap()


class Affinity:
    """Prefix hashes by worker, updated with each dispatched request."""

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, dict[str, _Home]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prefix hashes."""
        return len(self._homes)

    def note(self, prompt: PrefixHashes, worker: Worker, now: float) -> None:
        """Record that a prompt was dispatched to `worker`."""
        within, whole = _Home(worker.store, now), _Home(worker.store, now, whole=True)
        for mark, size in prompt.hashes:
            homes = self._homes.setdefault(mark, {})
            before = homes.pop(worker.incarnation, within)
            homes[worker.incarnation] = whole if before.whole or size == prompt.size else within
            if len(homes) > HOMES_MAX:
                del homes[next(iter(homes))]
            self._homes.move_to_end(mark)
        while len(self._homes) > HASHES_MAX:
            self._homes.popitem(last=False)

    def overlap(self, prompt: PrefixHashes, worker: Worker) -> PrefixOverlap:
        """Return how much of the prompt `worker` has probably computed, or can read from its store."""
        for mark, size in reversed(prompt.hashes):
            if (homes := self._homes.get(mark)) and (home := _home(homes, worker)):
                return PrefixOverlap(size / prompt.size, home.whole)
        return NOTHING

    def forget(self, incarnation: str) -> None:
        """Drop all records of a worker whose cache was cleared."""
        for mark in [
            mark for mark, homes in self._homes.items() if homes.pop(incarnation, None) and not homes
        ]:
            del self._homes[mark]


def _home(homes: Mapping[str, _Home], worker: Worker) -> _Home | None:
    """Return the worker's own record, or one of its store that is older than the worker."""
    if worker.incarnation in homes or not worker.store:
        return homes.get(worker.incarnation)
    found = [
        home for home in homes.values() if home.store == worker.store and home.noted_at < worker.connected_at
    ]
    return max(found, key=lambda home: home.whole, default=None)
