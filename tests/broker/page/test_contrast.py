"""Contrast of the page's colors, light and dark, by WCAG 2.2 (AA)."""

from __future__ import annotations

import re

import pytest

from tests.broker.page.scripts import ASSETS

TEXT, SHAPES = 4.5, 3.0
THEMES = ("light", "dark")

STYLES = {path.name: path.read_text(encoding="utf-8") for path in ASSETS.glob("*.css")}
PAIRS = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", STYLES["colors.css"])
COLORS = {theme: {name: both[place] for name, *both in PAIRS} for place, theme in enumerate(THEMES)}

GROUNDS = ("ground", "surface", "sunken")

# (foreground, background, minimum contrast)
APART = [
    *((text, on_worker_lost, TEXT) for text in ("ink", "muted", "accent") for on_worker_lost in GROUNDS),
    *((text, "surface", TEXT) for text in ("bad", "busy", "good")),
    *((text, "bad-ground", TEXT) for text in ("ink", "bad")),
    ("on-accent", "accent", TEXT),
    *(
        (shape, "surface", SHAPES)
        for shape in ("control", "good", "busy", "bad", "idle", "line-1", "line-2", "line-3")
    ),
    ("control", "ground", SHAPES),
    ("accent", "sunken", SHAPES),
    ("bad", "bad-ground", SHAPES),
]


def luminance(color: str) -> float:
    """Return the relative luminance of an sRGB color."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def mixed(share: float, one: str, other: str) -> str:
    """Return `color-mix(in srgb, one share, other)`."""
    pairs = [(int(one[place : place + 2], 16), int(other[place : place + 2], 16)) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


@pytest.mark.parametrize("theme", THEMES)
def test_colors_are_far_enough_apart(theme: str) -> None:
    colors = COLORS[theme]
    too_close = [(what, on) for what, on, least in APART if contrast(colors[what], colors[on]) < least]
    assert not too_close
    for share, color in ((0.22, "good"), (0.4, "bad")):
        assert contrast(colors["ink"], mixed(share, colors[color], colors["sunken"])) >= TEXT


def test_every_color_is_looked_at_here_or_only_decorates() -> None:
    looked_at = {name for what, on, _ in APART for name in (what, on)}
    assert set(COLORS["light"]) - looked_at == {"edge"}


def test_no_color_is_named_anywhere_else() -> None:
    known = set(COLORS["light"])
    for name, text in STYLES.items():
        if name != "colors.css":
            assert not re.findall(r"(?<![\w&-])#[0-9a-fA-F]{3,8}\b(?!\s*\{)", text), name
            assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= known | {"unlikely"}, name
