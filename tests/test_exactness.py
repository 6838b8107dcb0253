"""The table of exactness: its families and types are those of the program."""

from __future__ import annotations

import re

from tests.exactness import FAMILIES, MARK, TABLE, TYPES


def test_the_document_has_every_family_in_every_type() -> None:
    _, mark, text = TABLE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    sections = dict(re.findall(r"^### (.+)\n((?:.|\n)*?)(?=^###|\Z)", text, re.MULTILINE))
    assert list(sections) == list(TYPES)
    for section in sections.values():
        assert tuple(re.findall(r"^\| (\w+) \| (?!2 rows)", section, re.MULTILINE)) == FAMILIES
    assert len(FAMILIES) == len(set(FAMILIES)) == 10
