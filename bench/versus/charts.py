"""Charts as SVG, for light and dark themes: lines by concurrency, with a panel for each model, and the
trade-off, with a point for each server and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.rivals import KNOWN
from bench.versus.results import OURS, Results, server_of
from bench.versus.tables import names_of, number

PANEL_WIDTH, PANEL_HEIGHT = 250, 190
LEFT, TOP, GAP, BOTTOM = 46, 62, 54, 34
TICKS = 4
LIGHT = ("#0969da", "#bc4c00", "#8250df", "#1a7f37", "#bf3989")
DARK = ("#58a6ff", "#f0883e", "#bc8cff", "#3fb950", "#f778ba")
MODELS = ("dense", "hybrid", "vision")

Points = Mapping[int, float]


@dataclass(frozen=True)
class Panel:
    """One panel. `lines`: for each side, values by concurrency."""

    title: str
    lines: Mapping[str, Points]


def panels(results: Results, figure: str) -> list[Panel]:
    """Return a panel for each model that has results."""
    found = []
    for model in MODELS:
        entries = [
            entry
            for entry in results.entries.values()
            if (entry.model, entry.line, entry.figure) == (model, "throughput", figure)
        ]
        lines = {
            name: {
                entry.at: median
                for entry in sorted(entries, key=lambda entry: entry.at or 0)
                if entry.at is not None
                and name in entry.sides
                and (median := entry.sides[name].median) is not None
            }
            for name in names_of(entries)
        }
        known = {name: points for name, points in lines.items() if points}
        if known:
            found.append(Panel(model, known))
    return found


def step(largest: float) -> float:
    """Return the distance between ticks of a scale from 0 to at least `largest`: 1, 2 or 5 times a power of
    ten."""
    size = 10.0 ** (len(str(int(largest))) - 2) if largest >= 1 else 0.01
    while True:
        for factor in (1, 2, 5):
            if factor * size * TICKS >= largest:
                return factor * size
        size *= 10


def svg(title: str, unit: str, drawn: Sequence[Panel]) -> str:
    """Return the chart. Raises `ValueError` if there is nothing to draw."""
    names = _names({name for panel in drawn for name in panel.lines})
    parts = [_panel(panel, names, _left(place)) for place, panel in enumerate(drawn)]
    return _chart(f"{title}, {unit}" if unit else title, title, names, parts)


def _left(place: int) -> int:
    return LEFT + place * (PANEL_WIDTH + GAP)


def _names(known: set[str]) -> list[str]:
    return [name for name in KNOWN if name in known] + sorted(known.difference(KNOWN))


def _chart(headline: str, label: str, names: Sequence[str], panels: Sequence[Sequence[str]]) -> str:
    if not panels:
        raise ValueError(f"no results for {label!r}")
    width, height = _left(len(panels)), TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}">',
        _style(len(names)),
        # The dark theme follows the reader's system; the page around may be light.
        '<rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="{LEFT}" y="18">{escape(headline)}</text>',
        *_legend(names),
        *(part for panel in panels for part in panel),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _style(count: int) -> str:
    def colours(palette: Sequence[str]) -> str:
        used = enumerate(palette[:count])
        return "".join(f".s{n}{{stroke:{colour}}}.f{n}{{fill:{colour}}}" for n, colour in used)

    return (
        "<style>.back{fill:#fff}text{font:11px system-ui,sans-serif;fill:#1f2328}"
        ".title{font-size:13px;font-weight:600}.grid{stroke:#d1d9e0}.line{fill:none;stroke-width:2}"
        f"{colours(LIGHT)}"
        "@media(prefers-color-scheme:dark){.back{fill:#0d1117}text{fill:#e6edf3}.grid{stroke:#3d444d}"
        f"{colours(DARK)}}}</style>"
    )


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], LEFT
    for place, name in enumerate(names):
        parts.append(f'<rect class="f{place}" x="{x}" y="30" width="10" height="10"/>')
        parts.append(f'<text x="{x + 14}" y="39">{escape("ours" if name == OURS else name)}</text>')
        x += 26 + 7 * len(name)
    return parts


def _panel(panel: Panel, names: Sequence[str], left: int) -> list[str]:
    steps = sorted({at for points in panel.lines.values() for at in points})
    largest = max(value for points in panel.lines.values() for value in points.values())
    rise = step(largest)

    def place(at: int, value: float) -> tuple[float, float]:
        x = left + PANEL_WIDTH * (steps.index(at) + 0.5) / len(steps)
        return x, TOP + PANEL_HEIGHT * (1 - value / (TICKS * rise))

    parts = _frame(panel.title, rise, left)
    for at in steps:
        x, _ = place(at, 0)
        parts.append(f'<text x="{x:.1f}" y="{TOP + PANEL_HEIGHT + 16}" text-anchor="middle">{at}</text>')
    for name, points in sorted(panel.lines.items(), key=lambda line: line[0] == OURS):  # ours on top
        at_places = [place(at, value) for at, value in points.items()]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at_places)
        colour = names.index(name)
        parts.append(f'<path class="line s{colour}" d="M{path}"/>')
        parts += [f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at_places]
    return parts


def _frame(title: str, rise: float, left: int) -> list[str]:
    """Return a panel's title, and a scale from 0 in steps of `rise`."""
    parts = [f'<text x="{left}" y="{TOP - 6}">{escape(title)}</text>']
    for tick in range(TICKS + 1):
        y = TOP + PANEL_HEIGHT * (1 - tick / TICKS)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{PANEL_WIDTH}"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{number(tick * rise)}</text>')
    return parts


# --- the trade-off -----------------------------------------------------------------------------------


def tradeoff(results: Results, model: str) -> str:
    """Return throughput and first text over the gaps of streams, with a line through our settings. Raises
    `ValueError` if there is nothing to draw."""
    found = {name: results.find(model, "tradeoff", name, 8) for name in ("rate", "first", "gap99")}
    gaps, drawn = found["gap99"], []
    for place, name in enumerate(("rate", "first")):
        entry = found[name]
        if entry is None or gaps is None:
            continue
        points = {
            side: (x, y)
            for side in names_of([entry])
            if (x := gaps.sides[side].median) is not None and (y := entry.sides[side].median) is not None
        }
        drawn.append(_scatter(f"{entry.name}, {entry.unit}".rstrip(", "), points, _left(place)))
    title = "Throughput and first text over the longest gaps of streams"
    names = _names({server_of(name) for name in gaps.sides} if gaps else set())
    return _chart(f"{title}, p99, ms", title, names, drawn)


def _scatter(title: str, points: Mapping[str, tuple[float, float]], left: int) -> list[str]:
    names = _names({server_of(name) for name in points})
    rise, reach = (step(max(point[axis] for point in points.values())) for axis in (1, 0))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (value / (TICKS * size) for value, size in zip(point, (reach, rise), strict=True))
        return left + PANEL_WIDTH * x, TOP + PANEL_HEIGHT * (1 - y)

    parts = _frame(title, rise, left)
    for tick in range(TICKS + 1):
        x = left + PANEL_WIDTH * tick / TICKS
        below = f'x="{x:.1f}" y="{TOP + PANEL_HEIGHT + 16}" text-anchor="middle"'
        parts.append(f"<text {below}>{number(tick * reach)}</text>")
    ours = sorted(point for name, point in points.items() if server_of(name) == OURS)
    path = "L".join("{:.1f} {:.1f}".format(*place(point)) for point in ours)
    parts.append(f'<path class="line s{names.index(OURS)}" d="M{path}"/>')
    for name, point in points.items():
        x, y = place(point)
        size = 5 if name == OURS else 3
        colour = names.index(server_of(name))
        parts.append(f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>')
    return parts
