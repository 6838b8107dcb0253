"""A store of responses over a journal in memory, whose reads do not wait."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from broker.api.responses.store import KIND, ResponseStore
from broker.journal.file import Name, Quota, StoredEntry
from broker.journal.journal import Journal

T = TypeVar("T")


def response_store() -> ResponseStore:
    journal = Journal(None, 2**20, {KIND: Quota(100, 2**20)})

    async def read(name: Name) -> StoredEntry | None:
        return journal.read(name)

    return ResponseStore(journal, read, keeps=True)


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")
