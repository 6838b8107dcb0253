"""Who runs in this step. Plain Python, deterministic, no MLX, no clock.

Each step decodes every started row, then spends a budget of tokens on the prompts of the rows that came
first. What must always hold: a request is in exactly one phase; at most `rows_max` are past waiting; nobody
overtakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from worker.contract import Prepared


class Phase(Enum):
    """Where a request stands. It only ever moves forward, except when a failed step rewinds its prefill."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Row:
    """A request and how far it has come. `prefilled` counts prompt tokens that are in its cache."""

    request: Prepared
    phase: Phase = Phase.WAITING
    prefilled: int = 0

    @property
    def prefill_left(self) -> int:
        """Prompt tokens to run before the row can start: all but the last."""
        return len(self.request.tokens) - 1 - self.prefilled


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one row's prompt to run in this step. `last`: the row starts to decode after it."""

    row: Row
    tokens: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decode what is started, then run the chunks in order."""

    decode: bool = False
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.decode or bool(self.chunks)


class Scheduler:
    """The rows of one worker, first come first served."""

    def __init__(self, *, rows_max: int, prefill_tokens: int) -> None:
        self._rows_max = rows_max
        self._prefill_tokens = prefill_tokens
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def count(self, *phases: Phase) -> int:
        """How many rows stand in one of `phases`."""
        return sum(row.phase in phases for row in self._rows.values())

    def get(self, id: str) -> Row | None:
        return self._rows.get(id)

    def add(self, request: Prepared) -> Row:
        """A request joins the end of the queue."""
        if request.id in self._rows:
            raise ValueError(f"row {request.id} is there already")
        row = self._rows[request.id] = Row(request)
        return row

    def drop(self, id: str) -> Row | None:
        """The one place where a row leaves, for whatever reason. Idempotent."""
        return self._rows.pop(id, None)

    def plan(self) -> Plan:
        """The next step. Rows are admitted to prefill as places become free."""
        free = self._rows_max - self.count(Phase.PREFILL, Phase.DECODE)
        budget = self._prefill_tokens
        chunks = []
        for row in self._rows.values():
            if budget <= 0:
                break
            if row.phase is Phase.WAITING and free > 0:
                row.phase = Phase.PREFILL
                free -= 1
            if row.phase is Phase.PREFILL:
                chunk = self._chunk(row, budget)
                chunks.append(chunk)
                # A row that starts costs a forward pass even when nothing is left to prefill.
                budget -= max(1, len(chunk.tokens))
        return Plan(decode=self.count(Phase.DECODE) > 0, chunks=chunks)

    @staticmethod
    def _chunk(row: Row, budget: int) -> Chunk:
        size = min(budget, row.prefill_left)
        tokens = row.request.tokens[row.prefilled : row.prefilled + size]
        return Chunk(row, tokens, last=size == row.prefill_left)

    def ran(self, chunk: Chunk) -> None:
        """A chunk has been carried out."""
        chunk.row.prefilled += len(chunk.tokens)
        if chunk.last:
            chunk.row.phase = Phase.DECODE

    def rewind(self) -> None:
        """Every cache was lost: prefills begin anew. Started rows must have been dropped."""
        for row in self._rows.values():
            if row.phase is Phase.PREFILL:
                row.prefilled = 0
