"""Rendezvous of the ranks, on the leader: bind a socket, start the followers, wait until all have connected.

No rank joins upstream's group before that: joining blocks a process until all ranks have joined, for ever if
one does not.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

import zmq

from protocol import sockets
from protocol.common.temporary_folder import TemporaryFolder
from protocol.hosts import Backend, HostsError, problem_with, read
from protocol.settings.worker import WorkerSettings
from worker.interfaces import InsufficientMemoryError, ModelError
from worker.process.exit_codes import EXIT_BROKEN
from worker.ranks import rpc
from worker.ranks.launcher import LaunchPlan, LeaderEndpoint, RankProcesses
from worker.ranks.line import LeaderLine, PeerMonitor
from worker.ranks.rank_info import RankInfo

log = logging.getLogger(__name__)

_LISTEN_S = 0.2
READ_S_MAX = 3600.0
"""Timeout in seconds for followers to read their weights after the leader has its own. Disks differ in speed,
and a follower may have to download the model; the limit is for a file system that hangs."""


class RankAbsentError(InsufficientMemoryError):
    """A rank is not available. Retrying later may help."""


class Rendezvous:
    """Rendezvous of one model's ranks. `size`: number of ranks."""

    def __init__(
        self,
        settings: WorkerSettings,
        backend: Backend,
        here: RankInfo | None,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        """`here`: this rank, if all ranks were started externally; None: start those of `settings.hosts`, and
        set upstream's variables in `environ`. Raises `ModelError`, or `RankAbsentError` if retrying may help.
        """
        self.backend = backend
        self._settings = settings
        self._others = RankProcesses()
        self._folder: TemporaryFolder | None = None
        if here is not None:
            self.size = here.size
            self.line = _bound(here.endpoint, here.size, _configured_keys(settings))
            return
        plan, (own, theirs) = _plan(settings, backend), sockets.Curve.new_pair()
        self.size = len(plan.hosts.hosts)
        try:
            self._folder = TemporaryFolder("ranks")
            self.line = _bound(_endpoint(plan, self._folder.path), self.size, own)
            told = LeaderEndpoint(self.line.endpoint, self._folder.path, theirs)
            self._others.start(plan, told, settings, environ)
        except OSError as error:
            raise RankAbsentError(f"a rank cannot be started: {error}") from None

    def gather(self) -> PeerMonitor:
        """Wait until all ranks have connected; return the started monitor, which exits if a rank is lost."""
        self._await_all(rpc.RankUp, self._settings.join_timeout_s, "connect")
        self.line.stop_listening()
        watch = PeerMonitor(self.line.monitor, self.line.connections, self._lost)
        watch.start()
        return watch

    def await_read(self) -> None:
        """Wait until all ranks have their weights. Raises `RankAbsentError` after `READ_S_MAX` seconds."""
        self._await_all(rpc.WeightsLoaded, READ_S_MAX, "read the model")
        self.tidy()

    def _await_all(self, kind: type[rpc.RankUp | rpc.WeightsLoaded], seconds: float, what: str) -> None:
        missing, until = set(range(1, self.size)), time.monotonic() + seconds
        while missing:
            word = self._receive()
            if isinstance(word, kind):
                missing.discard(word.rank)
            if missing and time.monotonic() >= until:
                names = ", ".join(map(self._others.name, sorted(missing)))
                raise RankAbsentError(f"{names} did not {what} within {seconds:g} s")

    def tidy(self) -> None:
        """Delete the files, which only the start needs."""
        self.line.stop_listening()
        if self._folder is not None:
            self._folder.delete()

    def _receive(self) -> rpc.Word | None:
        """Receive a message, or None. Raises a rank's refusal, and `RankAbsentError` if a process ended."""
        word = self.line.receive(_LISTEN_S)
        if isinstance(word, rpc.Refused):
            kind = ModelError if word.for_good else RankAbsentError
            raise kind(f"{self._others.name(word.rank)}: {word.why}")
        if isinstance(word, rpc.RankUp):
            log.info("%s has connected: %s", self._others.name(word.rank), word.host)
        if word is None and (ended := self._others.ended()) is not None:
            raise RankAbsentError(ended)
        return word

    def _lost(self, reason: str) -> None:
        """Kill all followers and exit, on the monitor's thread."""
        ended = self._others.ended()
        self._others.kill()
        self.tidy()
        log.critical("%s%s: all ranks end", reason, f" ({ended})" if ended else "")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)


def _bound(endpoint: str, size: int, keys: sockets.Curve | None) -> LeaderLine:
    """Bind the leader's socket. Raises `ModelError` or `RankAbsentError`."""
    try:
        return LeaderLine(endpoint, size, keys)
    except sockets.EndpointError as error:
        raise ModelError(str(error)) from None
    except zmq.ZMQError as error:
        raise RankAbsentError(f"{endpoint}: {error}") from None


def _endpoint(plan: LaunchPlan, folder: Path) -> str:
    """Return the endpoint for ranks that the leader starts: on one machine, a socket in its own folder."""
    hosts = plan.hosts.hosts
    return f"ipc://{folder}/line" if all(host.is_here for host in hosts) else f"tcp://{hosts[0].ips[0]}:*"


def _configured_keys(settings: WorkerSettings) -> sockets.Curve | None:
    """Return the leader's keys for ranks that something else has started. Raises `ModelError`."""
    try:
        return sockets.Curve.load(settings.curve_keys, "gateway") if settings.curve_keys else None
    except sockets.EndpointError as error:
        raise ModelError(str(error)) from None


def _plan(settings: WorkerSettings, backend: Backend) -> LaunchPlan:
    """Read the hostfile. Raises `ModelError`."""
    assert settings.hosts is not None, "required to start ranks"
    try:
        hosts = read(settings.hosts)
    except HostsError as error:
        raise ModelError(str(error)) from None
    if wrong := problem_with(hosts, backend):
        raise ModelError(f"{settings.hosts}: {wrong}.")
    return LaunchPlan(hosts, backend, settings.hosts_port)


def backend_of(settings: WorkerSettings, here: RankInfo | None) -> Backend:
    """Return the communication backend of the ranks."""
    if here is not None:
        return here.backend
    if settings.backend is not None:
        return settings.backend
    try:
        known = read(settings.hosts).backend if settings.hosts else None
    except HostsError:
        known = None  # reported when the model is loaded
    return known or "ring"
