"""Loads a model as a set, on its first rank: starts the others, meets them, and leads them from then on.

Nobody waits for upstream without knowing that the others are there: they come to our line first, each within
its time, and are told to join then. While weights are read a rank may take as long as it likes; what all
compute together has a limit, and so has every later step (`stall_timeout`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import replace

import zmq

from protocol import sockets
from protocol.hosts import Backend, HostsError, read, wrong_with
from protocol.parts import Resources
from protocol.workersettings import WorkerSettings
from worker.contract import Model, ModelError, NoRoomError, Progress
from worker.models.part import PartLoader
from worker.models.split import Split
from worker.ranks import calls
from worker.ranks.leader import Leader
from worker.ranks.line import LeaderLine
from worker.ranks.place import Place
from worker.ranks.starting import Others, Plan
from worker.ranks.watch import Watch

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
PROOF_S_MAX = 300.0
"""What trying a model and warming it up may take, of which nothing waits for a disk."""
_LISTEN_S = 0.2


class RankAbsentError(NoRoomError):
    """A rank that is not there. Trying again later may help."""


class SetLoader:
    """`contract.Loader` for the first rank."""

    def __init__(
        self,
        loader: PartLoader,
        split: Split,
        settings: WorkerSettings,
        here: Place | None = None,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        """`here`: where somebody else has started all ranks; None: they are started, by `settings.hosts`."""
        self.name = loader.name
        self._loader = loader
        self._split = split
        self._settings = settings
        self._here = here
        self._environ = environ
        self._others = Others()
        self._line: LeaderLine | None = None

    def load(self, progress: Progress) -> Model:
        """See `contract.Loader`. Raises `RankAbsentError` where somebody does not come, or has gone."""
        line = self._line = self._bind()
        size = self._start(line)
        self._gather(line, size)
        watch = Watch(line.monitor, self._lost)
        watch.start()
        line.call(calls.Join())
        self._split.join()
        self._loader.read(progress)
        self._await_read(line, size)
        watch.allow(PROOF_S_MAX, "trying the model")
        line.call(calls.Prove())
        model = self._loader.model()
        watch.allow(float("inf"), "")
        log.info(
            "%d ranks run %s, split by %s over %s", size, self.name, self._split.mode, self._split.backend
        )
        return replace(model, engine=Leader(model.engine, line))

    def device_memory(self) -> Resources:
        """See `PartLoader`."""
        return self._loader.device_memory()

    # --- meeting ---

    def _bind(self) -> LeaderLine:
        """Raises `ModelError`, or `RankAbsentError` where the address is taken just now."""
        endpoint = self._here.endpoint if self._here else f"tcp://{self._plan().hosts.hosts[0].ips[0]}:*"
        try:
            return LeaderLine(endpoint, self._settings.curve_keys)
        except sockets.EndpointError as error:
            raise ModelError(str(error)) from None
        except zmq.ZMQError as error:
            raise RankAbsentError(f"{endpoint}: {error}") from None

    def _plan(self) -> Plan:
        """Raises `ModelError`."""
        settings = self._settings
        assert settings.hosts is not None, "or there is nobody to start"
        try:
            hosts = read(settings.hosts)
        except HostsError as error:
            raise ModelError(str(error)) from None
        if wrong := wrong_with(hosts, self._split.backend):
            raise ModelError(f"{settings.hosts}: {wrong}.")
        return Plan(hosts, self._split.backend, settings.hosts_port)

    def _start(self, line: LeaderLine) -> int:
        """How many ranks there are to be."""
        if self._here is not None:
            return self._here.size
        plan = self._plan()
        try:
            self._others.start(plan, line.endpoint, self._settings, self._environ)
        except OSError as error:
            raise RankAbsentError(f"a rank cannot be started: {error}") from None
        return len(plan.hosts.hosts)

    def _gather(self, line: LeaderLine, size: int) -> None:
        """Until all ranks have been heard of."""
        missing = set(range(1, size))
        until = time.monotonic() + self._settings.join_timeout_s
        while missing:
            word = self._heard(line)
            if isinstance(word, calls.Here):
                missing.discard(word.rank)
                log.info("%s is there: %s", self._others.name(word.rank), word.host)
            if missing and time.monotonic() >= until:
                names = ", ".join(self._others.name(rank) for rank in sorted(missing))
                waited = f"within {self._settings.join_timeout_s:g} s"
                raise RankAbsentError(f"{self.name}: {names} did not come {waited}")

    def _await_read(self, line: LeaderLine, size: int) -> None:
        """Until all have their weights; the watch knows when one has gone."""
        missing = set(range(1, size))
        while missing:
            if isinstance(word := self._heard(line), calls.Read):
                missing.discard(word.rank)

    def _heard(self, line: LeaderLine) -> calls.Word | None:
        word = line.hear(_LISTEN_S)
        if isinstance(word, calls.Refused):
            kind = ModelError if word.for_good else RankAbsentError
            raise kind(f"{self._others.name(word.rank)}: {word.why}")
        if word is None and (ended := self._others.ended()) is not None:
            raise RankAbsentError(f"{self.name}: {ended[0]}")
        return word

    def _lost(self, reason: str) -> None:
        """On the watch's thread: nothing of the set is left."""
        self._others.kill()
        ended = self._others.ended()
        log.critical("%s%s: the set ends", reason, f" ({ended[0]})" if ended else "")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)


def backend_of(settings: WorkerSettings, here: Place | None) -> Backend:
    """What connects the ranks."""
    if here is not None:
        return here.backend
    if settings.backend is not None:
        return settings.backend
    try:
        known = read(settings.hosts).backend if settings.hosts else None
    except HostsError:
        known = None  # said when it is loaded
    return known or "ring"
