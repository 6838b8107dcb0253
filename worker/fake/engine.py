"""`contract.Engine` from a script: rows that answer, dawdle, hang and die as their prompts say."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.contract import NO_TARGETS, Cut, Draw, Likelihood, Piece, Shape, Step, Targets
from worker.drafts import NO_DRAFTS, Drafter, Weigher
from worker.fake.pictures import FakeSight
from worker.fake.script import Script
from worker.guides import Foreseen
from worker.pictures import Blob, Picture

TOKEN_BYTES = 16
END = 0
WORDS = ("steam", "signal", "turntable", "wagon", "tender", "駅", "🚂", "boiler", "rails", "whistle")
"""What tokens read, from 1 on."""


@dataclass(slots=True)
class FakeRow:
    """A started row. `fed`: a step has set out to draw its next token."""

    script: Script
    draw: Draw
    prompt_tokens: int
    drawn: int
    fed: bool = False


@dataclass(slots=True)
class FakeEngine:
    """Rows that follow their scripts, which come from the preparers over a mapping that both share."""

    scripts: MutableMapping[str, Script]
    step_ms: float
    shape: Shape | None = field(default_factory=Shape)
    drafter: Drafter | None = None
    weigher: Weigher | None = None
    can_leave_out: bool = False
    rows: dict[str, FakeRow] = field(default_factory=dict)
    sight: FakeSight = field(default_factory=FakeSight)

    def look(self, picture: Picture) -> int:
        return self.sight.look(picture)

    def forget(self, digest: str) -> None:
        self.sight.forget(digest)

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        self.sight.show(row, pictures)

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, Targets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Likelihood]]:
        if any(self._script(row).burst for row in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(self._script(row).oom for row in chunks):
            raise MemoryError("scripted: out of memory")
        for row, tokens in chunks.items():
            self.sight.ran(row, tokens)
        time.sleep(max(self._script(row).prefill_ms for row in chunks) / 1000)
        return {row: [_likelihood(token, of.top) for token in of.tokens] for row, of in targets.items()}

    def leave_out(self, row: str, first: int, last: int) -> None:
        """Rows have no caches here."""

    def fork(self, row: str, copy: str) -> None:
        """Rows have no caches here."""
        self.sight.copy(row, copy)

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        script = self._script(row)
        if script.oom:
            raise MemoryError("scripted: out of memory")
        self.rows[row] = FakeRow(script, draw, prompt_tokens, drawn=len(tokens) - prompt_tokens)

    def _script(self, row: str) -> Script:
        return self.scripts.get(row, Script())

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        """What is drafted is passed over."""
        pause_ms = max([self.step_ms, *(row.script.slow_ms for row in self.rows.values())])
        if pause_ms:
            time.sleep(pause_ms / 1000)
        drawn = {id: self._draw(row) for id, row in self.rows.items() if row.fed}
        for row in self.rows.values():
            row.fed = True
        asking = {id: self.rows[id].draw.logprobs for id in drawn}
        return Step(drawn, {id: _likelihood(drawn[id], top) for id, top in asking.items() if top is not None})

    def _draw(self, row: FakeRow) -> int:
        script, number = row.script, row.drawn
        if number == script.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == script.hang:
            threading.Event().wait()
        if number == script.fail:
            raise RuntimeError("scripted: the step fails")
        if number >= script.tokens:
            return END
        row.drawn += 1
        seed = row.draw.seed if row.draw.temperature else 0
        return 1 + (seed + 7 * (row.prompt_tokens + number)) % len(WORDS)

    def foresee(self, row: str, most: int) -> Foreseen:
        """See `contract.Engine`."""
        return Foreseen()

    def drop(self, row: str) -> None:
        self.rows.pop(row, None)
        self.sight.drop(row)

    def reset(self) -> None:
        self.rows.clear()
        self.sight.clear()

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """Rows have no caches here, so copies are of nothing, at the price of tokens."""
        cuts = [Cut((first, last), TOKEN_BYTES * (last - first), whole_from=first) for first, last in runs]
        return cuts, Cut((), TOKEN_BYTES) if states else None

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """See `cut`."""
        self.sight.restored(row, sum(piece.count for piece in pieces))

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        return {"nothing": Blob("U8", (TOKEN_BYTES,), bytes(TOKEN_BYTES))}, payload

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        return Cut(tuple(rest), TOKEN_BYTES)

    def cache_bytes(self) -> int:
        return sum(self.row_bytes(row.prompt_tokens + row.drawn) for row in self.rows.values())

    def row_bytes(self, tokens: int) -> int:
        return TOKEN_BYTES * tokens


def _likelihood(token: int, top: int) -> Likelihood:
    """The drawn token is the likeliest, those after it in the vocabulary follow."""
    others = [(token + n) % (len(WORDS) + 1) for n in range(top)]
    return Likelihood(-0.5, tuple((other, -0.5 * (1 + n)) for n, other in enumerate(others)))
