"""The table of exactness: its families and types are those of the program, and its cells are measured."""

from __future__ import annotations

import re

from protocol.types import PassCheck
from tests.exactness import FAMILIES, MARK, TABLE, TYPES, cell, compared, in_4_bits, row, tables
from worker.models.probes.row_counts import TABLE_CHECKS


def test_the_document_has_every_family_in_every_type() -> None:
    _, mark, text = TABLE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    sections = dict(re.findall(r"^### (.+)\n((?:.|\n)*?)(?=^###|\Z)", text, re.MULTILINE))
    assert list(sections) == list(TYPES)
    for section in sections.values():
        assert tuple(re.findall(r"^\| (\w+) \| (?!2 rows)", section, re.MULTILINE)) == FAMILIES
    assert len(FAMILIES) == len(set(FAMILIES)) == 10


def test_a_program_run_has_the_same_layout() -> None:
    def measured(family: str, convert: object) -> object:
        return Measured

    class Measured:
        checks = ()

    written = tables(measured)  # type: ignore[arg-type]
    heads = re.compile(r"^(?:###.*|\| family .*)$", re.MULTILINE)
    assert heads.findall(written) == heads.findall(TABLE.read_text(encoding="utf-8").partition(MARK)[2])


def test_a_cell_is_the_worst_of_its_column() -> None:
    same = PassCheck(kind="verify", rows=1, tokens=2)
    rounded = PassCheck(kind="verify", rows=1, tokens=4, difference=2e-5)
    other = PassCheck(kind="verify", rows=4, tokens=4, differs_at=3, difference=0.25)
    assert [cell([]), cell([same]), cell([same, rounded])] == ["not run", "equal", "2e-05"]
    assert cell([same, rounded, other]) == "token 3 (2e-01)"
    assert row("m", [PassCheck(kind="decode", rows=4), rounded]) == (
        "| m | not run | equal | not run | not run | 2e-05 | not run | not run |"
    )


def test_a_family_is_measured_in_every_kind_of_pass() -> None:
    found = compared("llama", in_4_bits)
    assert [(c.kind, c.rows, c.tokens) for c in found.checks] == [
        (c.kind, c.rows, c.tokens) for c in TABLE_CHECKS
    ]
    assert found.checks[0].is_exact
