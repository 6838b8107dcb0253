"""Charts are well-formed, contain the measurements, and are readable in light and dark mode."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.versus.charts import DARK, LIGHT, TICKS, Panel, panels, step, svg, tradeoff
from bench.versus.results import OURS, Entry, Results, Run, Side, merge

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*shown: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(svg("A < B & C", "ms", shown))


def test_a_line_for_each_side_with_ours_on_top_and_a_point_for_each_value() -> None:
    panel = Panel("dense", {OURS: {1: 10.0, 16: 30.0}, "other": {1: 5.0, 16: 20.0, 64: 25.0}})
    root = drawn(panel)
    lines = [path for path in root.iter(f"{SVG}path") if "line" in path.get("class", "")]
    assert [len(re.findall(r"[ML]", path.get("d", ""))) for path in lines] == [3, 2]
    assert len(list(root.iter(f"{SVG}circle"))) == 5


def test_larger_values_are_drawn_higher_within_the_panel() -> None:
    root = drawn(Panel("dense", {OURS: {1: 10.0, 4: 20.0, 16: 0.5}}))
    heights = [float(point.get("cy", "")) for point in root.iter(f"{SVG}circle")]
    assert heights[1] < heights[0] < heights[2]
    assert all(0 < height < float(root.get("height", "")) for height in heights)


def test_chart_text_is_escaped_and_title_is_the_aria_label() -> None:
    root = drawn(Panel("dense", {OURS: {1: 1.0}}))
    assert root.get("aria-label") == "A < B & C"
    assert "A < B & C, ms" in [text.text for text in root.iter(f"{SVG}text")]


def test_there_are_colours_for_dark() -> None:
    written = svg("t", "", [Panel("dense", {"a": {1: 1.0}, "b": {1: 2.0}})])
    light, dark = written.split("prefers-color-scheme:dark")
    assert all(colour in light for colour in LIGHT[:2])
    assert all(colour in dark for colour in DARK[:2])


def test_empty_chart_is_refused() -> None:
    with pytest.raises(ValueError, match="no results"):
        svg("t", "", [])


@given(st.floats(1e-6, 1e9))
def test_a_scale_reaches_all_and_not_much_more(largest: float) -> None:
    assert step(largest) * TICKS >= largest
    assert step(largest) * TICKS <= max(5.5 * largest, 0.04)


def test_panels_are_made_of_the_models_that_are_known() -> None:
    run = Run(began="", cores=1, processor="", blas="", load=[], rounds=1, versions={})
    entries = [
        Entry(
            model="hybrid",
            line="throughput",
            figure="rate",
            name="tokens/s",
            unit="",
            better="more",
            run="a",
            sides={OURS: Side([float(at)]), "dead": Side(note="dead")},
            at=at,
        )
        for at in (16, 1)
    ]
    found = panels(merge(Results(), "a", run, entries), "rate")
    assert found == [Panel("hybrid", {OURS: {1: 1.0, 16: 16.0}})]
    assert panels(Results(), "rate") == []


def test_the_trade_off_has_a_point_for_each_setting_and_server_in_both_panels() -> None:
    run = Run(began="", cores=1, processor="", blas="", load=[], rounds=1, versions={})
    sides = {OURS: (20.0, 400.0), f"{OURS} 2 s": (25.0, 900.0), "rapid-mlx": (15.0, 2000.0)}
    entries = [
        Entry(
            model="smollm2",
            line="tradeoff",
            figure=figure,
            name=figure,
            unit="",
            better="more",
            run="a",
            sides={name: Side([values[figure == "gap99"]]) for name, values in sides.items()},
            at=8,
        )
        for figure in ("rate", "first", "gap99")
    ]
    root = ElementTree.fromstring(tradeoff(merge(Results(), "a", run, entries), "smollm2"))
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * len(sides)
    assert [path for path in root.iter(f"{SVG}path") if "line" in path.get("class", "")]
    with pytest.raises(ValueError, match="no results"):
        tradeoff(Results(), "smollm2")
