"""The commands in the documents: fenced blocks, taken out so that they can be run.

The first word behind a fence says what a block is written in. A second one says in which environment it can
be run, where that is not ours: one of `tests.conformance.recipes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ADDRESS = "127.0.0.1:8000"
"""Where the documents have the server."""


@dataclass(frozen=True, slots=True)
class Block:
    """`place`: the document and the line of its fence. `environment`: empty where it is ours."""

    place: str
    language: str
    environment: str
    text: str

    def at(self, address: str) -> str:
        """The text, with the server at another address."""
        return self.text.replace(ADDRESS, address)

    @property
    def first(self) -> str:
        """What it begins with."""
        return self.text.splitlines()[0]


def blocks(document: Path) -> Iterator[Block]:
    """Those of a document that say what they are written in, in order."""
    text = document.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{document.relative_to(ROOT)}:{line}", found[1], found[2] or "", found[3])


def all_blocks() -> list[Block]:
    """Those of all documents."""
    return [block for document in DOCUMENTS for block in blocks(document)]
