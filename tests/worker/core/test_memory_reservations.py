"""Memory that rows have reserved, and what is left beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import Code, RequestError
from tests.factories import engine_request
from tests.worker.engines import picture
from worker.core.memory_reservations import Reservations
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.values import ArrayBytes


def test_what_is_spare_is_neither_reserved_nor_in_use() -> None:
    reservations = Reservations(1000, lambda length: length)
    reservations.reserved = 300
    assert [reservations.spare(used) for used in (0, 300, 450, 2000)] == [700, 700, 550, 0]
    assert Reservations(None, lambda length: length).spare(300) is None


def test_decoded_images_count_until_their_answers_end() -> None:
    scheduler = Scheduler(SchedulerConfig(rows_max=8, bytes_max=1000, row_bytes=lambda length: length))
    pixels = {"pixel_values": ArrayBytes("U8", (400,), bytes(400))}

    def come(id: str) -> None:
        image = replace(picture(id, 2, 4), inputs=pixels)
        scheduler.add(replace(engine_request(id, tuple(range(10)), max_tokens=9), images=(image,)), 0.0)

    come("a")
    come("b")
    assert scheduler.reservations.free(0) == 200
    assert scheduler.reservations.spare(0) == 200
    with pytest.raises(RequestError) as caught:
        come("c")
    assert (caught.value.code, caught.value.retry_after_s) == (Code.TEXT_GENERATION_BUSY, 5.0)
    scheduler.add(engine_request("text", (1, 2), max_tokens=9), 0.0)
    scheduler.drop("a")
    come("c")
    for id in ("b", "c", "text"):
        scheduler.drop(id)
    assert scheduler.reservations.pixel_bytes == 0
