"""Runner of batches: validates them, sends their lines, stores the answers, and writes the result files.

On the event loop; everything that touches a disk runs on the store's thread. The oldest batch goes first, and
the next ones use the rows that it leaves. Invariants:

* `DeferredQueue` permits each line in flight, and their bodies have at most `BODIES_BYTES_MAX` bytes;
* a line counts as done when its result is on the disk, and a line that is done is never sent again;
* an answer that asks for a retry is no result: the batch waits a moment, and sends the line again;
* if results cannot be stored, no further line is sent until they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from broker.api.batches import processing, records
from broker.api.batches.lines import Line, LineAnswer, answered, usage_of, with_seed
from broker.api.batches.processing import LineIndex
from broker.api.batches.records import BatchRecord, Ending, LineFault, LineResult
from broker.api.batches.store import BatchStore, StorageError
from broker.dispatch.deferred import RETRY_S, DeferredQueue, WorkSource

log = logging.getLogger(__name__)

T = TypeVar("T")

Send = Callable[[BatchRecord, Line], Awaitable[LineAnswer]]
"""Sends a line as a request of its dialect. An answer with a status of `RETRIED` is no result."""

BODIES_BYTES_MAX = 64 * 2**20
RETRIED = frozenset((429, 503))
TICK_S = 1.0
"""Interval of checks for windows that end, and for a folder that another process uses."""
SWEEP_S = 600.0
"""Interval at which old files and batches are deleted."""
CLOSE_S_MAX = 10.0
SHOWN_MAX = 16
"""Maximum number of unfinished batches that the status lists, the oldest first."""


class ClosedError(StorageError):
    """The store is closed: the gateway ends."""


class StoreThread:
    """The thread of a store."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self.is_closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    async def do(self, work: Callable[..., T], *args: object) -> T:
        """Return what `work` returns on the thread. Raises what it raises, or `ClosedError`."""
        if self.is_closed:
            raise ClosedError("another gateway process runs the batches now")
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def close(self) -> None:
        """Release the folder, after the work in progress."""
        self.is_closed = True
        self._pool.submit(self.store.close)
        self._pool.shutdown(wait=True, cancel_futures=False)


@dataclass(slots=True, eq=False)
class _Run:
    """A batch whose lines run. `found`: results that are not stored yet."""

    id: str
    index: LineIndex
    source: WorkSource
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    found: list[LineResult] = field(default_factory=list)


class BatchRunner:
    """The runner of one gateway. `clock`: Unix time in seconds."""

    def __init__(
        self,
        thread: StoreThread,
        clock: Callable[[], float],
        *,
        line_bytes_max: int,
        retention_s: int,
    ) -> None:
        self.thread = thread
        self.problem = ""
        """Why batches do not go on: the folder cannot be used; empty if it can."""
        self._store = thread.store
        self._send: Send
        self._queue: DeferredQueue
        self._clock = clock
        self._line_bytes_max = line_bytes_max
        self._retention_s = retention_s
        self._runs: dict[str, _Run] = {}
        self._bytes_in_flight = 0
        self._event = asyncio.Event()
        self._swept_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, send: Send, queue: DeferredQueue) -> None:
        """Start to run batches, those of an earlier process included."""
        self._send, self._queue = send, queue
        self._task = asyncio.create_task(self._main(), name="batches")

    def wake(self) -> None:
        """Signal that a batch is new or has changed."""
        self._event.set()

    def overview(self) -> dict[str, Any]:
        """Return the part of the status document: numbers, progress, and what batches wait for."""
        unfinished = self._unfinished()
        return {
            "statuses": dict(Counter(batch.status for batch in list(self._store.batches.values()))),
            "requests": {
                "total": sum(batch.counts.total for batch in unfinished),
                "succeeded": sum(batch.counts.succeeded for batch in unfinished),
                "errored": sum(batch.counts.errored for batch in unfinished),
                "in_flight": sum(run.source.in_flight for run in self._runs.values()),
            },
            "bytes": self._store.used,
            "bytes_max": self._store.bytes_max,
            "problem": self.problem,
            "unfinished": [
                {
                    "id": batch.id,
                    "status": batch.status,
                    "endpoint": batch.endpoint,
                    "model": batch.model,
                    "total": batch.counts.total,
                    "succeeded": batch.counts.succeeded,
                    "errored": batch.counts.errored,
                    "created_at": batch.created_at,
                    "expires_at": batch.expires_at,
                }
                for batch in unfinished[:SHOWN_MAX]
            ],
        }

    def _unfinished(self) -> list[BatchRecord]:
        """Return the batches that are not over, the oldest first."""
        batches = [batch for batch in list(self._store.batches.values()) if not batch.is_over]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    async def close(self) -> None:
        """Stop sending lines; answers that have arrived are stored. Lines in flight run again at the next
        start. Idempotent."""
        if self.thread.is_closed:
            return
        tasks = [task for run in self._runs.values() for task in run.tasks]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S_MAX)
        try:
            for run in self._runs.values():
                await self._store_results(run)
        finally:
            await asyncio.to_thread(self.thread.close)

    # --- the loop ---

    async def _main(self) -> None:
        while True:
            self._event.clear()
            try:
                await self._turn()
            except (StorageError, OSError) as error:
                if str(error) != self.problem:
                    log.warning("batches wait: %s", error)
                self.problem = str(error)
                await asyncio.sleep(TICK_S)
                continue
            self.problem = ""
            self._queue.pump()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), TICK_S)

    async def _turn(self) -> None:
        """Do everything that can be done now. Raises `StorageError` or `OSError`."""
        if not self._store.is_open:
            if not self._store.exists():
                return
            await self.thread.do(self._store.open)
        now = self._clock()
        if now - self._swept_at > SWEEP_S:
            await self.thread.do(self._store.expire, now, self._retention_s)
            self._swept_at = now
        for batch in self._unfinished():
            await self._advance(batch.id)

    async def _advance(self, id: str) -> None:
        batch = self._store.batches.get(id)
        if batch is None:
            return
        run = self._runs.get(id)
        if run is None and (run := await self._open(batch)) is None:
            return
        await self._store_results(run)
        batch = self._store.batches[id]
        if batch.status in ("in_progress", "validating"):
            if self._clock() >= batch.expires_at:
                await self._stop(run, "expired")
            elif not (run.source.waiting or run.source.in_flight):
                await self._stop(run, "completed")
            else:
                self._queue.sources[id] = run.source
        elif batch.status == "cancelling":
            await self._stop(run, "cancelled")
        else:
            await self._finalize(run)

    async def _open(self, batch: BatchRecord) -> _Run | None:
        """Return the run of a batch, which is validated first if it is new; None if it failed."""
        try:
            prepared = await self.thread.do(
                processing.prepare, self._store, batch.id, self._line_bytes_max, self._clock()
            )
        except FileNotFoundError:
            fault = LineFault(code="file_not_found", message="The input file of the batch is gone.")
            await self.thread.do(self._change, batch.id, partial(records.fail, faults=[fault]))
            return None
        if prepared is None:
            return None
        index, unanswered = prepared
        source = WorkSource(lambda number: self._begin(run, number), lambda number: batch.created_at)
        source.waiting.extend(unanswered)
        run = self._runs[batch.id] = _Run(batch.id, index, source)
        return run

    async def _stop(self, run: _Run, ending: Ending) -> None:
        """Cancel the lines of a batch that are in flight, and end it with what it has."""
        self._queue.sources.pop(run.id, None)
        for task in run.tasks:
            task.cancel()
        if run.tasks:
            await asyncio.wait(list(run.tasks), timeout=CLOSE_S_MAX)
        await self._store_results(run)
        await self.thread.do(self._change, run.id, partial(records.finalize, ending=ending))
        await self._finalize(run)

    async def _finalize(self, run: _Run) -> None:
        await self.thread.do(
            processing.finalize, self._store, run.id, run.index, self._retention_s, self._clock()
        )
        del self._runs[run.id]
        batch = self._store.batches[run.id]
        done, total = batch.counts.done, batch.counts.total
        log.info("%s %s: %d of %d lines answered", run.id, batch.status, done, total)

    def _change(self, id: str, change: Callable[..., BatchRecord]) -> None:
        self._store.put(change(self._store.batches[id], now=self._clock()))

    async def _store_results(self, run: _Run) -> None:
        if found := list(run.found):
            await self.thread.do(self._store.append, run.id, found)
            del run.found[: len(found)]
            run.source.in_flight -= len(found)

    # --- lines ---

    def _begin(self, run: _Run, number: int) -> bool:
        """Send a line, if results can be stored and there is memory for its body."""
        size = run.index.sizes[number - 1]
        if self.problem or (self._bytes_in_flight and self._bytes_in_flight + size > BODIES_BYTES_MAX):
            return False
        self._bytes_in_flight += size
        run.source.in_flight += 1
        task = asyncio.create_task(self._answer(run, number), name=f"{run.id} line {number}")
        run.tasks.add(task)
        task.add_done_callback(partial(self._ended, run, number, size))
        return True

    def _ended(self, run: _Run, number: int, size: int, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        self._bytes_in_flight -= size
        if task.cancelled():
            run.source.in_flight -= 1
        elif (error := task.exception()) is not None:
            log.error("%s line %d could not be sent", run.id, number, exc_info=error)
            self._retry(run, number)
        self._event.set()

    async def _answer(self, run: _Run, number: int) -> None:
        batch = self._store.batches[run.id]
        line = await self.thread.do(processing.read, self._store, batch, run.index, number)
        body = with_seed(line.body, batch.seed_of(number), batch.endpoint)
        answer = await self._send(batch, Line(number, line.custom_id, body))
        if answer.status in RETRIED:
            self._retry(run, number)
            return
        run.source.retry_s = RETRY_S
        document = answered(batch, line, answer)
        run.found.append(LineResult(number, answer.is_success, usage_of(answer), document))

    def _retry(self, run: _Run, number: int) -> None:
        """Send a line again after a while."""
        run.source.in_flight -= 1
        run.source.waiting.appendleft(number)
        self._queue.refuse(run.source)
