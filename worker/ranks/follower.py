"""A rank that is not the first: it reads its part of the model, and then does as it is told, for ever.

It has no tokenizer, no gateway and no will of its own: whatever fails here ends the process, and with it the
set. It ends with the first rank, and ignores the signals that only that one is to hear.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from protocol import sockets
from protocol.naming import name_of
from protocol.settings import EXIT_CONFIGURATION
from protocol.workersettings import WorkerSettings
from worker.contract import Cut, Draw, Engine, ModelError, NoRoomError, Piece
from worker.guides import Foreseen, Guide
from worker.models.part import part_loader
from worker.models.partdrafts import PartDrafts
from worker.models.split import Split
from worker.ranks import calls
from worker.ranks.line import FollowerLine
from worker.ranks.memory import TELL_EVERY_S, Telling
from worker.ranks.place import FIRST, Place
from worker.ranks.watch import Watch

C = TypeVar("C", bound=calls.Call)

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
HEARD_S_MAX = 10.0
"""How long the first rank has for hearing why this one refuses."""


class _Anything:
    """A grammar that allows everything: the first rank, which has the true one, says what was drawn. But rows
    that have one must be drawn at the same point of a step everywhere."""

    def open(self, answered: Sequence[int]) -> Guide:
        return self

    def saw(self, token: int) -> None:
        pass

    def fill(self, mask: memoryview) -> bool:
        return False

    def foresee(self, most: int) -> Foreseen:
        return Foreseen()


class Follower:
    """Obeys on an engine of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[int, object] = {}

    @property
    def kept(self) -> Mapping[int, object]:
        """The payloads that may be restored, by their numbers."""
        return self._kept

    def obey(self, call: calls.Call) -> None:
        """Raises whatever the engine does."""
        engine = self._engine
        match call:
            case calls.Prefill(chunks, targets):
                engine.prefill(chunks, targets)
            case calls.Step(drafts):
                engine.step(drafts)
            case calls.Start(row, tokens, prompt_tokens, draw, held):
                engine.start(row, tokens, prompt_tokens, _held(draw) if held else draw)
            case calls.LeaveOut(row, first, last):
                engine.leave_out(row, first, last)
            case calls.Fork(row, copy):
                engine.fork(row, copy)
            case calls.Drop(row):
                engine.drop(row)
            case calls.Reset():
                engine.reset()
            case _:
                self._tend(call)

    def _tend(self, call: calls.Call) -> None:
        """What is stored of rows."""
        match call:
            case calls.CutOut(row, runs, states, first):
                cuts, state = self._engine.cut(row, runs, states=states)
                everything: list[Cut] = [*cuts, *([state] if state is not None else [])]
                self._kept |= {first + index: cut.payload for index, cut in enumerate(everything)}
            case calls.Restore(row, pieces, states):
                found = [Piece(self._kept[number], *rest) for number, *rest in pieces]
                self._engine.restore(row, found, None if states is None else self._kept[states])
            case calls.LetGo(numbers):
                for number in numbers:
                    del self._kept[number]
            case _:
                raise ValueError(f"nothing to obey: {call}")


def _held(draw: Draw) -> Draw:
    return replace(draw, grammar=_Anything())


def run(place: Place, settings: WorkerSettings) -> int:
    """Until the first rank is gone, which ends the process from another thread. The exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        line = FollowerLine(place.endpoint, place.rank, settings.curve_keys)
    except sockets.EndpointError as error:
        log.error("%s", error)
        return EXIT_CONFIGURATION
    if not line.say(calls.Here(place.rank, platform.node()), settings.join_timeout_s):
        log.error("the first rank is not there: %s", place.endpoint)
        _end_first()
        return EXIT_BROKEN
    Watch(line.monitor, _ends).start()
    try:
        _follow(place, line, settings)
    except (ModelError, NoRoomError) as error:
        log.error("%s", error)
        for_good = isinstance(error, ModelError)
        line.say(calls.Refused(place.rank, str(error), for_good), HEARD_S_MAX)
        threading.Event().wait(HEARD_S_MAX)
        return EXIT_CONFIGURATION if for_good else EXIT_BROKEN
    except Exception:
        log.critical("rank %d has failed", place.rank, exc_info=True)
    return EXIT_BROKEN


def _follow(place: Place, line: FollowerLine, settings: WorkerSettings) -> NoReturn:
    """Raises what ends it."""
    split, join = Split(place.backend, settings.split), _expect(line.hear(), calls.Join)
    name = settings.served_name or name_of(settings.model or None)
    drafts = PartDrafts(name, draft_model=None, uses_heads=join.uses_heads, leads=False, trials=None)
    loader = part_loader(settings, split, drafts, has_drafts=join.has_drafts)
    split.join()
    loader.read(lambda done, total: None)
    line.say(calls.Read(place.rank), HEARD_S_MAX)
    _expect(line.hear(), calls.Prove)
    follower, told = Follower(loader.engine()), Telling(place.rank, line.say, loader.device_memory)
    log.info("rank %d follows", place.rank)
    told.tell()
    while True:
        if (call := line.hear(TELL_EVERY_S)) is not None:
            follower.obey(call)
        told.after(call)


def _expect(call: calls.Call | None, kind: type[C]) -> C:
    if not isinstance(call, kind):
        raise ValueError(f"{kind.__name__} must come before {call}")
    return call


def _end_first() -> None:
    """A first rank that is gone, and is still this one's parent, has been stopped, or hangs: nobody else may
    find that out before it serves."""
    parent = os.getppid()
    if os.environ.get(FIRST) == str(parent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)


def _ends(reason: str) -> None:
    log.info("the first rank has ended: so does this one")
    _end_first()
    logging.shutdown()
    os._exit(0)
