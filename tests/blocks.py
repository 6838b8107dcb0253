"""Fenced code blocks of the documents. The word after the language names the environment that a block needs,
one of `tests.conformance.recipes`; without it the block runs in the repository's environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ADDRESS = "127.0.0.1:8000"
"""The address of the server in the documents."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `place`: document and line of its fence. `environment`: empty for the default."""

    place: str
    language: str
    environment: str
    text: str

    def at(self, address: str) -> str:
        return self.text.replace(ADDRESS, address)

    @property
    def first(self) -> str:
        return self.text.splitlines()[0]


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document that name their language, in order."""
    text = document.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{document.relative_to(ROOT)}:{line}", found[1], found[2] or "", found[3])


def all_blocks() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document)]
