"""Memory that rows have reserved, and what is left beside it."""

from __future__ import annotations

from worker.schedule.memory_reservations import Reservations


def test_what_is_spare_is_neither_reserved_nor_in_use() -> None:
    reservations = Reservations(1000, lambda length: length)
    reservations.reserved = 300
    assert [reservations.spare(used) for used in (0, 300, 450, 2000)] == [700, 700, 550, 0]
    assert Reservations(None, lambda length: length).spare(300) is None
