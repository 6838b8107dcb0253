"""Generator of documents with results: replaces the text between two markers."""

from __future__ import annotations

from pathlib import Path

from bench.versus import tables
from bench.versus.results import Results

BEGIN, END = "<!-- versus: begin -->", "<!-- versus: end -->"
README, BENCHMARKS = Path("README.md"), Path("docs/benchmarks.md")


def between(text: str, written: str) -> str:
    """Return `text` with `written` between its markers. Raises `ValueError` unless each marker occurs exactly
    once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"no single {BEGIN} before a single {END}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def write(results: Results, root: Path) -> None:
    """Write both documents. Raises `ValueError` as `between` does."""
    for path, written in ((README, tables.short(results)), (BENCHMARKS, tables.whole(results))):
        document = root / path
        document.write_text(between(document.read_text(encoding="utf-8"), written), encoding="utf-8")
