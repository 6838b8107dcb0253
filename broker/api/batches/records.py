"""Records of files and batches, as they are stored, and the transitions of a batch. Pure.

    validating → in_progress → finalizing → completed
        ↓             ↓ (its window ends)  → expired
      failed          ↓ cancelling         → cancelled

A record is immutable; each transition returns the next one, with the time at which it was entered. `ending`
says which status follows `finalizing`, so that a restart in between ends the batch in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Dialect = Literal["openai", "anthropic"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Ending = Literal["completed", "expired", "cancelled"]
Purpose = Literal["batch", "batch_output", "message_batch", "message_batch_results"]

OVER: frozenset[BatchStatus] = frozenset(("failed", "completed", "expired", "cancelled"))
WINDOW_S = 24 * 3600
"""Completion window of a batch in seconds: the only one that the APIs have."""
_SEED_BITS = 63


Tokens = tuple[int, int, int, int]
"""Input, cached, output and reasoning tokens."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of line `number`: `document` is its line of the result file."""

    number: int
    is_success: bool
    tokens: Tokens
    document: bytes


class FileRecord(Struct, frozen=True, kw_only=True):
    """A stored file. `owner`: namespace of its API key, empty without keys. Times are Unix times in seconds.

    Files with a purpose of Anthropic's API, which has no files of batches, are not listed.
    """

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int

    @property
    def is_listed(self) -> bool:
        return self.purpose in ("batch", "batch_output")


class LineFault(Struct, frozen=True, kw_only=True):
    """A reason why a batch cannot run. `line`: number of the line, from 1; None: it concerns the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(Struct, frozen=True, kw_only=True):
    """Numbers of a batch's lines, and of the tokens of its answers."""

    total: int = 0
    succeeded: int = 0
    errored: int = 0
    expired: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def done(self) -> int:
        return self.succeeded + self.errored

    def plus(self, result: LineResult) -> Counts:
        """Return the counts with another result."""
        read, cached, output, reasoning = result.tokens
        return replace(
            self,
            succeeded=self.succeeded + result.is_success,
            errored=self.errored + (not result.is_success),
            input_tokens=self.input_tokens + read,
            cached_tokens=self.cached_tokens + cached,
            output_tokens=self.output_tokens + output,
            reasoning_tokens=self.reasoning_tokens + reasoning,
        )


class BatchRecord(Struct, frozen=True, kw_only=True):
    """A batch. `model`: that of its first line. `entered`: when it entered each status, by name.

    `output_expires_s`: age at which its result files are deleted. `seed`: from which those of its lines are
    derived, so that a line that runs again has the same answer.
    """

    id: str
    owner: str
    dialect: Dialect
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    seed: int
    status: BatchStatus = "validating"
    ending: Ending = "completed"
    entered: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    model: str | None = None
    faults: list[LineFault] = []
    counts: Counts = Counts()
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: int | None = None
    result_bytes: int = 0
    """Bytes of the results that are stored until it is over."""

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def cancels(self) -> bool:
        return "cancelling" in self.entered

    def with_results(self, results: Sequence[LineResult]) -> BatchRecord:
        """Return the batch with the counts and bytes of further results."""
        nbytes = self.result_bytes + sum(len(result.document) for result in results)
        return replace(self, counts=reduce(Counts.plus, results, self.counts), result_bytes=nbytes)

    def seed_of(self, line: int) -> int:
        """Return the seed of a line that names none."""
        digest = hashlib.sha256(f"{self.seed}/{line}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)

    def result_file_id(self, kind: str) -> str:
        """Return the id of a result file, which is the same however often the batch is finalized."""
        return "file-" + hashlib.sha256(f"{self.id}/{kind}".encode()).hexdigest()[:24]


def enter(batch: BatchRecord, status: BatchStatus, now: float) -> BatchRecord:
    """Return the batch in `status`, entered now."""
    return replace(batch, status=status, entered=batch.entered | {status: int(now)})


def fail(batch: BatchRecord, faults: list[LineFault], now: float) -> BatchRecord:
    """Return the batch as failed before any of its lines ran."""
    return replace(enter(batch, "failed", now), faults=faults)


def begin(batch: BatchRecord, total: int, model: str | None, now: float) -> BatchRecord:
    """Return the validated batch, whose lines may run."""
    return replace(enter(batch, "in_progress", now), model=model, counts=Counts(total=total))


def cancel(batch: BatchRecord, now: float) -> BatchRecord:
    """Return the batch as being cancelled; a batch that is over, or ends anyway, does not change."""
    if batch.status not in ("validating", "in_progress"):
        return batch
    return enter(batch, "cancelling", now)


def finalize(batch: BatchRecord, ending: Ending, now: float) -> BatchRecord:
    """Return the batch as being finalized, or still as being cancelled, as the API has it."""
    if ending == "cancelled":
        return replace(batch, ending=ending)
    return replace(enter(batch, "finalizing", now), ending=ending)


def finish(
    batch: BatchRecord, counts: Counts, output: str | None, errors: str | None, now: float
) -> BatchRecord:
    """Return the batch with its result files, over."""
    ended = enter(batch, batch.ending, now)
    return replace(ended, counts=counts, output_file_id=output, error_file_id=errors, result_bytes=0)
