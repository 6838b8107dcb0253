"""Server-sent events, in pieces of any size."""

from __future__ import annotations

import pytest

from protocol.event_stream import events

STREAMS: list[tuple[str, list[str]]] = [
    ("data: one\n\ndata:two\n\n", ["one", "two"]),
    ("data: a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\n\n", ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"]),
    ("data: one\r\rdata: two\r\n\r\nid: 3\r\n\r\n", ["one", "two"]),
    (": keep-alive\n\nevent: x\ndata: {\ndata:  1}\n\n", ["{\n 1}"]),
    ("\ufeffdata: one\n\ndata\ndatabase: no\n\ndata: [DONE]", ["one", "[DONE]"]),
]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_end_at_lines_of_the_standard_only(size: int) -> None:
    for text, expected in STREAMS:
        raw = text.encode()
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert [data.decode() for data in events(pieces)] == expected
