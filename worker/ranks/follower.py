"""Follower rank: loads its shard of the model, then executes the leader's calls until it exits.

It has no tokenizer and no gateway connection. Any failure ends the process, and with it all ranks. It ends
with the leader, and ignores SIGINT and SIGTERM, which only the leader handles.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

import psutil

from protocol import sockets
from protocol.common.footprint import footprint_bytes
from protocol.settings.reader import EXIT_CONFIGURATION
from protocol.settings.worker import WorkerSettings
from protocol.types import MemoryUsage, RankMemory
from worker.interfaces import Engine, InsufficientMemoryError, ModelError
from worker.load.options import LoadOptions
from worker.load.sharded.loader import ShardLoader
from worker.load.sharded.parallelism import ShardGroup
from worker.process.exit_codes import EXIT_BROKEN
from worker.ranks import rank_info, rpc
from worker.ranks.line import FollowerLine, PeerMonitor
from worker.ranks.rank_info import FIRST, RankInfo
from worker.values import CacheSegment, CacheSlice, ForcedTokens, Guide, SamplingParams

C = TypeVar("C", bound=rpc.Call)

log = logging.getLogger(__name__)

TELL_EVERY_S = 2.0
"""Least interval in seconds of reports of this rank's memory."""
_SAY_S_MAX = 0.1
HEARD_S_MAX = 10.0
"""Timeout in seconds for messages to the leader, and how long this rank waits after a refusal."""


class _Anything:
    """Grammar that allows everything. Only the leader has the real one and determines the sampled token, but
    rows with a grammar must be sampled at the same point of a step on all ranks."""

    def open(self, answered: Sequence[int]) -> Guide:
        return self

    def accept_token(self, token: int) -> None:
        pass

    def fill(self, mask: memoryview) -> bool:
        return False

    def forced_tokens(self, most: int) -> ForcedTokens:
        return ForcedTokens()


class Follower:
    """Executes the leader's calls on this rank's engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[int, object] = {}

    @property
    def kept(self) -> Mapping[int, object]:
        """Payloads that may be restored, by number."""
        return self._kept

    def obey(self, call: rpc.Call) -> None:
        """Execute a call. Raises any exception of the engine."""
        engine = self._engine
        match call:
            case rpc.Prefill(chunks, targets, last):
                engine.prefill(chunks, targets, last)
            case rpc.RunStep(drafts):
                engine.step(drafts)
            case rpc.StartRow(row, tokens, prompt_tokens, sampling, held):
                engine.start(row, tokens, prompt_tokens, _held(sampling) if held else sampling)
            case rpc.Expect(row, tokens):
                engine.expect_tokens(row, tokens)
            case rpc.Fork(row, copy):
                engine.fork(row, copy)
            case rpc.DropRow(row):
                engine.drop(row)
            case rpc.Reset():
                engine.reset()
            case _:
                self._tend(call)

    def _tend(self, call: rpc.Call) -> None:
        """Execute a call about stored cache slices."""
        match call:
            case rpc.CutOut(row, runs, states, first):
                cuts, state = self._engine.copy_cache(row, runs, states=states)
                everything: list[CacheSlice] = [*cuts, *([state] if state is not None else [])]
                self._kept |= {first + index: cut.payload for index, cut in enumerate(everything)}
            case rpc.Restore(row, pieces, states):
                found = [CacheSegment(self._kept[number], *rest) for number, *rest in pieces]
                self._engine.restore(row, found, None if states is None else self._kept[states])
            case rpc.Release(numbers):
                for number in numbers:
                    del self._kept[number]
            case _:
                raise ValueError(f"unexpected call: {call}")


def _held(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, grammar=_Anything())


class MemoryReporter:
    """Memory reporter of a follower. `send`: `FollowerLine.send`; `device`: returns MLX's memory usage."""

    def __init__(
        self,
        rank: int,
        send: Callable[[rpc.Word, float], bool],
        device: Callable[[], MemoryUsage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._send = send
        self._device = device
        self._clock = clock
        self._process = psutil.Process()
        self._told_at = clock()
        self._has_news = False

    def after(self, call: rpc.Call | None) -> None:
        """Report if there were calls since the last report, at most every `TELL_EVERY_S` seconds. `call`: the
        call just executed, or None."""
        self._has_news = self._has_news or call is not None
        if self._has_news and self._clock() - self._told_at >= TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Report now."""
        self._has_news, self._told_at = False, self._clock()
        device = self._device()
        taken = RankMemory(
            rank=self._rank,
            host=platform.node(),
            resident_bytes=int(self._process.memory_info().rss),
            footprint_bytes=footprint_bytes(),
            device_bytes=device.device_bytes,
            device_peak_bytes=device.device_peak_bytes,
            device_spare_bytes=device.device_spare_bytes,
        )
        self._send(rpc.MemoryReport(taken), _SAY_S_MAX)


def run(place: RankInfo, settings: WorkerSettings) -> int:
    """Follow the leader; return the exit status of a failure. The loss of the leader ends the process from
    another thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        line = FollowerLine(place.endpoint, place.rank, _keys(settings))
    except sockets.EndpointError as error:
        log.error("%s", error)
        return EXIT_CONFIGURATION
    if not line.send(rpc.RankUp(place.rank, platform.node()), settings.join_timeout_s):
        log.error("rank 0 cannot be reached: %s", place.endpoint)
        _end_first()
        return EXIT_BROKEN
    PeerMonitor(line.monitor, line.connection, _ends).start()
    try:
        _follow(place, line, settings)
    except (ModelError, InsufficientMemoryError) as error:
        log.error("%s", error)
        for_good = isinstance(error, ModelError)
        line.send(rpc.Refused(place.rank, str(error), for_good), HEARD_S_MAX)
        threading.Event().wait(HEARD_S_MAX)
        return EXIT_CONFIGURATION if for_good else EXIT_BROKEN
    except Exception:
        log.critical("rank %d has failed", place.rank, exc_info=True)
    return EXIT_BROKEN


def _keys(settings: WorkerSettings) -> sockets.Curve | None:
    """Return this rank's keys: those that its leader sends, or else the configured ones. Raises
    `EndpointError`."""
    if os.environ.pop(rank_info.KEYS, ""):
        return rank_info.read_keys(sys.stdin.fileno(), settings.join_timeout_s)
    return sockets.Curve.load(settings.curve_keys, "worker") if settings.curve_keys else None


def _follow(place: RankInfo, line: FollowerLine, settings: WorkerSettings) -> NoReturn:
    """Load the shard, then execute calls. Raises the failure that ends it."""
    split, join = ShardGroup(place.backend, settings.split), _expect(line.receive(), rpc.Join)
    loader = ShardLoader(
        settings.model or None,
        split,
        LoadOptions.of(settings),
        measures_verify_cost=join.measures_verify_cost,
    )
    split.join()
    loader.read(lambda done, total: None)
    line.send(rpc.WeightsLoaded(place.rank), HEARD_S_MAX)
    _expect(line.receive(), rpc.Prove)
    follower, told = Follower(loader.engine()), MemoryReporter(place.rank, line.send, loader.device_memory)
    log.info("rank %d follows rank 0", place.rank)
    told.tell()
    while True:
        if (call := line.receive(TELL_EVERY_S)) is not None:
            follower.obey(call)
        told.after(call)


def _expect(call: rpc.Call | None, kind: type[C]) -> C:
    if not isinstance(call, kind):
        raise ValueError(f"expected {kind.__name__}, got {call}")
    return call


def _end_first() -> None:
    """Kill the leader if it is still this process's parent. It is then stopped or hangs, which nothing else
    may detect before it serves requests."""
    parent = os.getppid()
    if os.environ.get(FIRST) == str(parent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)


def _ends(reason: str) -> None:
    log.info("connection to rank 0 lost: this rank ends")
    _end_first()
    logging.shutdown()
    os._exit(0)
