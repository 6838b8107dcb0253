"""Runner of batches over a real store: lines that are refused or fail for the moment are sent again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from broker.api.batches import runner as runner_module
from broker.api.batches.lines import Line, LineAnswer
from broker.api.batches.records import BatchRecord
from broker.api.batches.runner import BatchRunner, StoreThread
from broker.api.batches.store import BatchStore
from broker.dispatch.deferred import RETRY_S, DeferredQueue
from tests.broker.api.batches.test_store import BYTES_MAX, NOW, batch_record, content, upload

GOOD = LineAnswer(200, "req_1", b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}')


class Clock:
    """Unix time that passes with each look."""

    def __init__(self) -> None:
        self.now = float(NOW)

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_a_line_is_sent_until_it_has_an_answer_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "TICK_S", 0.005)
    store = BatchStore(tmp_path, BYTES_MAX)
    store.open()
    upload(store, "file-1", content(4))
    store.put(batch_record("batch_1", "file-1"))
    store.put(batch_record("batch_2", "file-gone"))
    clock, sent, most = Clock(), list[tuple[int, float]](), 0

    async def send(batch: BatchRecord, line: Line) -> LineAnswer:
        nonlocal most
        times = [number for number, _ in sent].count(line.number)
        sent.append((line.number, clock.now))
        most = max(most, queue.lines)
        await asyncio.sleep(0)
        match line.number, times:
            case 2, 0 | 1 | 2:
                return LineAnswer(503 if times else 429, "req_0", b"{}")
            case 3, 0:
                raise OSError("no descriptor is left")
        return GOOD

    async def run() -> None:
        runner.start(send, queue)
        await _until(lambda: all(batch.is_over for batch in store.batches.values()))
        assert runner.overview()["statuses"] == {"completed": 1, "failed": 1}
        counts = store.batches["batch_1"].counts
        assert (counts.succeeded, counts.errored) == (4, 0)
        output = store.batches["batch_1"].output_file_id
        assert output is not None
        results = [json.loads(line) for line in store.content_path(output).read_bytes().splitlines()]
        assert {result["custom_id"] for result in results} == {"c1", "c2", "c3", "c4"}
        await runner.close()
        await runner.close()

    runner = BatchRunner(StoreThread(store), clock, line_bytes_max=2**16, retention_s=10**6)
    queue = DeferredQueue(lambda model: 2, clock)
    asyncio.run(run())
    numbers = [number for number, _ in sent]
    assert {number: numbers.count(number) for number in (1, 2, 3, 4)} == {1: 1, 2: 4, 3: 2, 4: 1}
    assert most == 3, "two rows, and half of that again"
    at = [when for number, when in sent if number == 2]
    waits = [after - before for before, after in pairwise(at)]
    assert min(waits) >= RETRY_S, "no line is sent again at once"
