"""The table of exactness: its families and types are those of the program, and a cell has what differs."""

from __future__ import annotations

import re

from protocol.types import PassCheck
from tests.exactness import FAMILIES, MARK, TABLE, TYPES, cell


def test_the_document_has_every_family_in_every_type() -> None:
    _, mark, text = TABLE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert rows[0] == ("family", *TYPES)
    assert tuple(name for name, *_ in rows[1:]) == FAMILIES
    assert len(FAMILIES) == len(set(FAMILIES)) == 10


def test_a_cell_has_the_worst_of_each_kind_that_differs() -> None:
    equal = [PassCheck(kind=kind, rows=4) for kind in ("decode", "verify", "prompts", "chunks")]
    assert cell(equal) == "equal"
    assert cell([]) == "not run"
    others = [
        PassCheck(kind="verify", rows=1, differs_at=3, difference=0.1),
        PassCheck(kind="chunks", rows=1, difference=0.06),
    ]
    assert cell([*equal, *others]) == "several tokens: token 3 (1e-01); chunks: 6e-02"
    assert cell([PassCheck(kind=each.kind, rows=4, difference=1e-5) for each in equal]) == "up to 1e-05"
