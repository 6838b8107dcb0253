"""Generator of documents with results: replaces the text between two markers, and rewrites the charts."""

from __future__ import annotations

from pathlib import Path

from bench.versus import charts, tables
from bench.versus.results import Results

BEGIN, END = "<!-- versus: begin -->", "<!-- versus: end -->"
README, BENCHMARKS, CHARTS = Path("README.md"), Path("docs/benchmarks.md"), Path("docs")
TRADEOFF = "benchmarks-tradeoff.svg"
FIGURES = {
    "benchmarks-throughput.svg": ("Tokens per second by requests at once", "rate", ""),
    "benchmarks-first-text.svg": ("Time to the first text by requests at once", "first", "ms"),
    "benchmarks-cpu.svg": ("CPU per 1,000 tokens by requests at once", "cpu", "s"),
}


def between(text: str, written: str) -> str:
    """Return `text` with `written` between its markers. Raises `ValueError` unless each marker occurs exactly
    once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"no single {BEGIN} before a single {END}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def write(results: Results, root: Path) -> None:
    """Write all documents and charts. Raises `ValueError` as `between` and `charts.svg` do."""
    for path, written in ((README, tables.short(results)), (BENCHMARKS, tables.whole(results))):
        document = root / path
        document.write_text(between(document.read_text(encoding="utf-8"), written), encoding="utf-8")
    for name, (title, figure, unit) in FIGURES.items():
        (root / CHARTS / name).write_text(
            charts.svg(title, unit, charts.panels(results, figure)), encoding="utf-8"
        )
    if any(entry.line == "tradeoff" for entry in results.entries.values()):
        (root / CHARTS / TRADEOFF).write_text(charts.tradeoff(results, "smollm2"), encoding="utf-8")
