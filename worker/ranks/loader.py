"""Loads a model on several ranks, from the leader.

Reading the weights has a long timeout (`READ_S_MAX`). Collective computation has a shorter one
(`PROOF_S_MAX`), and so has every later step (`stall_timeout_s`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from protocol.common.model_folder import name_of
from protocol.settings.worker import WorkerSettings
from protocol.types import RankMemory, Resources
from worker.interfaces import Model, ModelError, Progress
from worker.process.startup_timer import StartupTimer
from worker.ranks import rpc
from worker.ranks.leader import Leader
from worker.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from worker.load.sharded.loader import ShardLoader

log = logging.getLogger(__name__)

_LISTEN_S = 0.1
_HEARD_MAX = 64
"""Maximum number of followers' messages read at once."""
PROOF_S_MAX = 300.0
"""Timeout in seconds for probing the model and warming it up, which do not wait for a disk."""


class RankMemoryTable:
    """The followers' last reports, on the leader."""

    def __init__(self, hear: Callable[[float], rpc.Word | None]) -> None:
        """`hear`: returns the next message that comes within some seconds, if any."""
        self._hear = hear
        self._taken: dict[int, RankMemory] = {}

    def await_all(self, ranks: int) -> None:
        """Wait until `ranks` followers have reported, which each does after warming up."""
        while len(self._taken) < ranks:
            self._note(self._hear(_LISTEN_S))

    def read(self) -> list[RankMemory]:
        """Return the reports in the order of ranks, without blocking."""
        for _ in range(_HEARD_MAX):
            word = self._hear(0.0)
            if word is None:
                break
            self._note(word)
        return [self._taken[rank] for rank in sorted(self._taken)]

    def _note(self, word: rpc.Word | None) -> None:
        if isinstance(word, rpc.MemoryReport):
            self._taken[word.taken.rank] = word.taken


class SetLoader:
    """`Loader` of the leader."""

    def __init__(
        self,
        settings: WorkerSettings,
        meeting: Rendezvous,
        timer: StartupTimer | None = None,
    ) -> None:
        self.name = settings.served_name or name_of(settings.model or None)
        self._settings = settings
        self._meeting = meeting
        self._timer = timer
        self._ledger = RankMemoryTable(meeting.line.receive)
        self._loader: ShardLoader | None = None

    def load(self, progress: Progress) -> Model:
        """Load the model on all ranks. Also raises `RankAbsentError` if a rank does not connect."""
        # These imports take seconds, so they come after the worker has connected to the gateway.
        from worker.load.options import LoadOptions
        from worker.load.sharded.loader import ShardLoader
        from worker.load.sharded.parallelism import ShardGroup

        meeting, line, settings = self._meeting, self._meeting.line, self._settings
        for option, value in (
            ("--exact", settings.exact),
            ("--experts-memory", settings.experts_memory),
            ("--draft-model", settings.draft_model),
        ):
            if value:
                raise ModelError(f"{self.name}: {option} is for models that one machine runs: leave it out.")
        split = ShardGroup(meeting.backend, settings.split)
        is_drafting = settings.speculation == "auto"
        loader = self._loader = ShardLoader(
            settings.model or None,
            split,
            LoadOptions.of(settings),
            timer=self._timer,
            measures_verify_cost=is_drafting,
        )
        watch = meeting.gather()
        line.call(rpc.Join(is_drafting))
        split.join()
        loader.read(progress)
        meeting.await_read()
        watch.allow(PROOF_S_MAX, "probing the model")
        line.call(rpc.Prove())
        model = loader.model()
        self._ledger.await_all(split.size - 1)
        watch.allow(math.inf, "")
        log.info("%d ranks run %s: %s over %s", split.size, self.name, split.mode, split.backend)
        return replace(model, engine=Leader(model.engine, line), adapters=None)

    def device_memory(self) -> Resources:
        """Return this rank's memory usage, 0 before loading, and that of the followers."""
        own = self._loader.device_memory() if self._loader else Resources()
        return structs.replace(own, ranks=self._ledger.read())


SET_STALL_S_MAX = 20.0
"""Default stall timeout of several ranks. A rank that waits for a lost peer never continues by itself."""


def of_set(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings adapted to several ranks: no prefix cache on disk, and a shorter stall timeout."""
    stall_s = settings.stall_timeout_s or SET_STALL_S_MAX
    return structs.replace(settings, stall_timeout_s=stall_s, prefix_cache_disk=0)
