"""Markdown tables of the results: the short one of the README, and all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.rivals import KNOWN
from bench.versus.results import OURS, Entry, Results, Run

LOST = "▼"
NOTHING = "–"


@dataclass(frozen=True)
class Choice:
    """A row of the README's table: one figure of one model."""

    label: str
    model: str
    line: str
    figure: str
    at: int | None = None


CHOICES = (
    *(Choice(f"chats, {at} at once: tokens/s", "smollm2", "chats", "rate", at) for at in (1, 4, 16)),
    *(
        Choice(f"chats, {at} at once: first text, median, ms", "smollm2", "chats", "first", at)
        for at in (4, 16)
    ),
    Choice("16 short chats at once: tokens/s", "smollm2", "starts", "rate", 16),
    Choice("16 short chats at once: gap between pieces, p99, ms", "smollm2", "starts", "gap99", 16),
    Choice("the same right after the start: tokens/s", "smollm2", "starts", "rate1", 16),
    Choice("right after the start: gap between pieces, p99, ms", "smollm2", "starts", "gap991", 16),
    Choice("`kill -9`: streams lost of 16", "dense", "kill", "lost"),
)


def number(value: float) -> str:
    """Format with three significant digits, or all before the decimal point; integers without decimals."""
    digits = 0 if value == int(value) or abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value:,.{digits}f}"


def names_of(entries: Iterable[Entry]) -> list[str]:
    """Return all sides, in the order of `KNOWN`, ours first; then the others."""
    found = {name for entry in entries for name in entry.sides}
    return [name for name in KNOWN if name in found] + sorted(found.difference(KNOWN))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


# --- the README's ------------------------------------------------------------------------------------


def short(results: Results) -> str:
    """Return a row for each choice that has results."""
    found = [(each, results.find(each.model, each.line, each.figure, each.at)) for each in CHOICES]
    shown = [(choice.label, entry) for choice, entry in found if entry is not None]
    names = names_of(entry for _, entry in shown)
    rows = [
        [
            f"{label} {LOST}" if entry.is_lost() else label,
            str(results.runs[entry.run].rounds),
            *(_median(entry, name) for name in names),
        ]
        for label, entry in shown
    ]
    return "\n".join(_table(["", "rounds", *(_title(name) for name in names)], rows))


def _median(entry: Entry, name: str) -> str:
    side = entry.sides.get(name)
    if side is None or side.median is None:
        return NOTHING
    return f"**{number(side.median)}**" if entry.best() == name else number(side.median)


def _title(name: str) -> str:
    return "ours" if name == OURS else f"`{name}`" if "." in name else name


# --- all results -------------------------------------------------------------------------------------


def whole(results: Results) -> str:
    """Return a table for each model and line, with its notes."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in results.entries.values():
        groups.setdefault((entry.model, entry.line), []).append(entry)
    lines = list(dict.fromkeys(line for _, line in groups))
    ordered = sorted(groups, key=lambda group: lines.index(group[1]))
    parts = [_group(model, line, groups[model, line]) for model, line in ordered]
    return "\n\n".join([*parts, _runs(results)])


def _group(model: str, line: str, entries: Sequence[Entry]) -> str:
    figures = list(dict.fromkeys(entry.figure for entry in entries))
    ordered = sorted(entries, key=lambda entry: (figures.index(entry.figure), entry.at or 0))
    names, notes = names_of(ordered), _notes(ordered)
    rows = [[_label(entry), *(_with_ratio(entry, name, notes) for name in names)] for entry in ordered]
    said = [f"{number}. {note}" for note, number in notes.items()]
    lines = [f"### {line}: {model}", "", *_table(["", *(_title(name) for name in names)], rows)]
    return "\n".join([*lines, *(["", *said] if said else [])])


def _notes(entries: Sequence[Entry]) -> dict[str, int]:
    said = dict.fromkeys(
        f"{name}: {side.note}" for entry in entries for name, side in entry.sides.items() if side.note
    )
    return {note: place for place, note in enumerate(said, 1)}


def _label(entry: Entry) -> str:
    unit = f", {entry.unit}" if entry.unit else ""
    at = f", {entry.at} at once" if entry.at is not None else ""
    return f"{entry.name}{unit}{at}{f' {LOST}' if entry.is_lost() else ''}"


def _with_ratio(entry: Entry, name: str, notes: dict[str, int]) -> str:
    side = entry.sides.get(name)
    if side is None:
        return NOTHING
    place = f" [{notes[f'{name}: {side.note}']}]" if side.note else ""
    ratio = None if name == OURS else entry.ratio(name)
    return _median(entry, name) + (f" · {ratio}" if ratio else "") + place


def _runs(results: Results) -> str:
    return "\n".join(["### Runs", "", *(_run(run) for run in results.runs.values())])


def _run(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    began, ended = run.load
    return (
        f"* {run.began}: {run.cores} cores ({run.processor}), load {began} at the start, {ended} at the end, "
        f"our own included; {run.rounds} rounds; float32 by {run.blas}; {versions}"
    )
