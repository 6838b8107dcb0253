"""Markdown tables of the results: the short one of the README, and one for each line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.rivals import KNOWN
from bench.timing import number
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


@dataclass(frozen=True)
class Table:
    """What docs/benchmarks.md shows of a line: a sentence, and figures by their keys, each with numbers of
    concurrent requests, none standing for all. The file of results has the others."""

    caption: str
    figures: Mapping[str, tuple[int, ...]]

    def shows(self, entry: Entry) -> bool:
        at = self.figures.get(entry.figure)
        return at is not None and (not at or entry.at in at)


TABLES = {
    "chats": Table("Chats of 40 to 700 tokens.", {"rate": (), "first": (4, 16), "gap99": (4, 16)}),
    "starts": Table(
        "Bursts of short chats, the first right after the start.",
        {"rate1": (16,), "rate": (1, 16, 64), "last": (16,), "gap99": (16,)},
    ),
    "together": Table("Unequal chats that come together.", {"first": (), "done": (), "longest": ()}),
    "decode": Table("Unequal chats that decode together.", {"rate": ()}),
    "alone": Table("Single requests.", {"first16": (), "first512": ()}),
    "throughput": Table(
        "Prompts of 126 tokens, or an image each.",
        {"rate": (1, 16, 64), "first": (16,), "gap99": (16,)},
    ),
    "reuse": Table(
        "Prefix caches.",
        {"warm": (), "crowd": (), "computed": (), "second": ()},
    ),
    "gaps": Table("Four streams beside a long prompt.", {"p99": (), "first": ()}),
    "overload": Table(
        "Ten times as many requests as a server can handle.", {"served": (), "refused": (), "lost": ()}
    ),
    "kill": Table(
        "`kill -9` of the model's process; other servers are restarted at once.",
        {"lost": (), "pause": (), "back": ()},
    ),
    "gateway": Table("The gateway alone.", {"events": (), "cpu": ()}),
}


def names_of(entries: Iterable[Entry]) -> list[str]:
    """Return all sides, in the order of `KNOWN`, ours first; then the others."""
    found = {name for entry in entries for name in entry.sides}
    return [name for name in KNOWN if name in found] + sorted(found.difference(KNOWN))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], f"|---|{'---:|' * (len(head) - 1)}", *lines[1:]]


def _median(entry: Entry, name: str) -> str:
    side = entry.sides.get(name)
    if side is None or side.median is None:
        return NOTHING
    return f"**{number(side.median)}**" if entry.best() == name else number(side.median)


def _title(name: str) -> str:
    return "ours" if name == OURS else f"`{name}`" if "." in name else name


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


# --- all lines ---------------------------------------------------------------------------------------


def whole(results: Results) -> str:
    """Return a table for each line, with its runs, why servers have no figures, and machines and versions."""
    parts = [_line(results, line, table) for line, table in TABLES.items()]
    return "\n\n".join([*(part for part in parts if part), _machines(results.runs.values())])


def _line(results: Results, line: str, table: Table) -> str:
    entries = [entry for entry in results.entries.values() if entry.line == line and table.shows(entry)]
    if not entries:
        return ""
    figures = list(table.figures)
    entries.sort(key=lambda entry: (entry.model, figures.index(entry.figure), entry.at or 0))
    names, notes = names_of(entries), _notes(entries)
    models = list(dict.fromkeys(entry.model for entry in entries))
    rows = [
        [_label(entry, len(models) > 1), *(_cell(entry, name, notes) for name in names)] for entry in entries
    ]
    runs = dict.fromkeys(_run(results.runs[entry.run]) for entry in entries)
    lines = [f"## {line}: {', '.join(models)}", "", f"{table.caption} {'; '.join(runs)}.", ""]
    lines += _table(["", *(_title(name) for name in names)], rows)
    remarks = [f"{place}. {note}" for note, place in notes.items()]
    return "\n".join([*lines, *(["", *remarks] if remarks else [])])


def _notes(entries: Sequence[Entry]) -> dict[str, int]:
    """Return why sides have no figures, numbered."""
    missing = dict.fromkeys(
        f"{name}: {side.note}"
        for entry in entries
        for name, side in entry.sides.items()
        if side.note and side.median is None
    )
    return {note: place for place, note in enumerate(missing, 1)}


def _label(entry: Entry, several: bool) -> str:
    model = f"{entry.model}: " if several else ""
    unit = f", {entry.unit}" if entry.unit else ""
    at = f", {entry.at}" if entry.at is not None else ""
    return f"{model}{entry.name}{unit}{at}{f' {LOST}' if entry.is_lost() else ''}"


def _cell(entry: Entry, name: str, notes: dict[str, int]) -> str:
    side = entry.sides.get(name)
    place = notes.get(f"{name}: {side.note}") if side and side.median is None else None
    return f"{NOTHING} [{place}]" if place else _median(entry, name)


def _run(run: Run) -> str:
    rounds = f"{run.rounds} round{'s' if run.rounds > 1 else ''}"
    return f"{run.began.partition(' ')[0]}, {rounds}, {run.blas}"


def _machines(runs: Iterable[Run]) -> str:
    runs = list(runs)
    machines = dict.fromkeys(f"{run.cores} cores ({run.processor})" for run in runs)
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, version in run.versions.items():
            versions.setdefault(name, {})[version] = None
    listed = (f"{name} {' and '.join(found)}" for name, found in versions.items())
    load = f"load up to {max(run.load[0] for run in runs)} before, {max(run.load[1] for run in runs)} after"
    return f"Machine: {'; '.join(machines)}, {load}, our own included. {', '.join(listed)}."
