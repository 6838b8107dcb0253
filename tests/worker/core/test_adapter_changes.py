"""Adapters that are loaded and removed by the loop, beside the rows that use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.messages import AdaptersChanged, Failed
from tests.scripted_worker.adapters import NBYTES
from tests.worker.engines import House
from worker.core.commands import AddAdapter, RemoveAdapter


def changes(house: House) -> list[AdaptersChanged]:
    return [message for message in house.published if isinstance(message, AdaptersChanged)]


def test_rows_get_their_adapter_before_their_prompt_runs() -> None:
    house = House()
    house.inbox.put(AddAdapter("sql", Path("/a/sql")))
    house.submit("a", 1, 2, adapter="sql")
    house.submit("b", 1, 2)
    house.run()
    assert house.engine.adapted == {"a": "sql"}
    assert [(m.name, m.error, [i.name for i in m.adapters]) for m in changes(house)] == [("sql", "", ["sql"])]


def test_an_unknown_adapter_is_refused() -> None:
    house = House()
    house.submit("a", 1, 2, adapter="sql")
    house.run()
    end = house.end("a")
    assert isinstance(end, Failed)
    assert end.code == "adapter_not_found"


def test_rows_of_a_removed_adapter_fail_and_others_go_on() -> None:
    house = House()
    house.inbox.put(AddAdapter("sql", Path("/a/sql")))
    house.submit("a", *range(1, 9), adapter="sql")
    house.submit("b", *range(1, 9))
    house.engine.at["step", 4] = lambda: house.inbox.put(RemoveAdapter("sql"))
    house.run()
    assert house.failed("a")
    assert house.reason("b") == "stop"
    assert [m.adapters == [] for m in changes(house)] == [False, True]


@pytest.mark.parametrize(("bytes_max", "fits"), [(NBYTES + 9, False), (NBYTES + 64, True)])
def test_adapters_leave_room_for_the_longest_row(bytes_max: int, fits: bool) -> None:
    """A token takes a byte, and the longest row, of ten tokens, reserves a block of 64."""
    house = House(bytes_max=bytes_max)
    house.inbox.put(AddAdapter("sql", Path("/a/sql")))
    house.submit("a", 1, 2)
    house.run()
    assert [bool(m.adapters) for m in changes(house)] == [fits]
    assert house.reason("a") == "stop"
