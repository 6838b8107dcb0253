"""How the ranks of a set find each other, from the first rank's side: it binds a line, starts the others, and
waits for each to say that it is there.

Nobody joins upstream's group before that: joining blocks a whole process until all have come, and for ever
where one does not.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping

import zmq

from protocol import sockets
from protocol.hosts import Backend, HostsError, read, wrong_with
from protocol.workersettings import WorkerSettings
from worker.contract import ModelError, NoRoomError
from worker.ranks import calls
from worker.ranks.line import LeaderLine
from worker.ranks.place import Place
from worker.ranks.starting import Others, Plan
from worker.ranks.watch import Watch

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
_LISTEN_S = 0.2


class RankAbsentError(NoRoomError):
    """A rank that is not there. Trying again later may help."""


class Meeting:
    """Of one set. `size`: how many ranks it has."""

    def __init__(
        self,
        settings: WorkerSettings,
        backend: Backend,
        here: Place | None,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        """`here`: where somebody else has started all ranks; None: they are started, by `settings.hosts`, and
        `environ` tells upstream so. Raises `ModelError`, or `RankAbsentError` for what may come right."""
        self.backend = backend
        self._settings = settings
        self._others = Others()
        if here is not None:
            self.size = here.size
            self.line = self._bound(here.endpoint)
            return
        plan = _plan(settings, backend)
        self.size = len(plan.hosts.hosts)
        self.line = self._bound(f"tcp://{plan.hosts.hosts[0].ips[0]}:*")
        try:
            self._others.start(plan, self.line.endpoint, settings, environ)
        except OSError as error:
            raise RankAbsentError(f"a rank cannot be started: {error}") from None

    def _bound(self, endpoint: str) -> LeaderLine:
        try:
            return LeaderLine(endpoint, self._settings.curve_keys)
        except sockets.EndpointError as error:
            raise ModelError(str(error)) from None
        except zmq.ZMQError as error:
            raise RankAbsentError(f"{endpoint}: {error}") from None

    def gather(self) -> Watch:
        """Until all ranks have been heard of. What ends the process when one of them goes, from now on."""
        missing = set(range(1, self.size))
        until = time.monotonic() + self._settings.join_timeout_s
        while missing:
            word = self._heard()
            if isinstance(word, calls.Here):
                missing.discard(word.rank)
                log.info("%s is there: %s", self._others.name(word.rank), word.host)
            if missing and time.monotonic() >= until:
                names = ", ".join(self._others.name(rank) for rank in sorted(missing))
                waited = f"within {self._settings.join_timeout_s:g} s"
                raise RankAbsentError(f"{names} did not come {waited}")
        watch = Watch(self.line.monitor, self._lost)
        watch.start()
        return watch

    def await_read(self) -> None:
        """Until all have their weights, which may take as long as it likes."""
        missing = set(range(1, self.size))
        while missing:
            if isinstance(word := self._heard(), calls.Read):
                missing.discard(word.rank)
        self._others.tidy()

    def _heard(self) -> calls.Word | None:
        """Raises what a rank refuses with, and for one whose process has ended."""
        word = self.line.hear(_LISTEN_S)
        if isinstance(word, calls.Refused):
            kind = ModelError if word.for_good else RankAbsentError
            raise kind(f"{self._others.name(word.rank)}: {word.why}")
        if word is None and (ended := self._others.ended()) is not None:
            raise RankAbsentError(ended)
        return word

    def _lost(self, reason: str) -> None:
        """On the watch's thread: nothing of the set is left."""
        ended = self._others.ended()
        self._others.kill()
        log.critical("%s%s: the set ends", reason, f" ({ended})" if ended else "")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)


def _plan(settings: WorkerSettings, backend: Backend) -> Plan:
    """Raises `ModelError`."""
    assert settings.hosts is not None, "or there is nobody to start"
    try:
        hosts = read(settings.hosts)
    except HostsError as error:
        raise ModelError(str(error)) from None
    if wrong := wrong_with(hosts, backend):
        raise ModelError(f"{settings.hosts}: {wrong}.")
    return Plan(hosts, backend, settings.hosts_port)


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
