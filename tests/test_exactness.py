"""The table of exactness: its families and types are those of the program, and its cells are measured."""

from __future__ import annotations

import re

from tests.exactness import FAMILIES, MARK, TABLE, TYPES, compared, in_4_bits
from worker.models.probes.row_counts import TABLE_CHECKS


def test_the_document_has_every_family_in_every_type() -> None:
    _, mark, text = TABLE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    sections = dict(re.findall(r"^### (.+)\n((?:.|\n)*?)(?=^###|\Z)", text, re.MULTILINE))
    assert list(sections) == list(TYPES)
    for section in sections.values():
        assert tuple(re.findall(r"^\| (\w+) \| (?!2 rows)", section, re.MULTILINE)) == FAMILIES
    assert len(FAMILIES) == len(set(FAMILIES)) == 10


def test_a_family_is_measured_in_every_kind_of_pass() -> None:
    found = compared("llama", in_4_bits)
    assert [(c.kind, c.rows, c.tokens) for c in found.checks] == [
        (c.kind, c.rows, c.tokens) for c in TABLE_CHECKS
    ]
    assert found.checks[0].is_exact
