"""Only the text between the markers is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.versus import results
from bench.versus.__main__ import JSON
from bench.versus.documents import BEGIN, BENCHMARKS, CHARTS, END, FIGURES, README, between, write

ROOT = Path(__file__).resolve().parents[3]


def test_text_around_markers_is_preserved() -> None:
    assert between(f"before\n{BEGIN}\nold\n{END}\nafter", "new") == f"before\n{BEGIN}\nnew\n{END}\nafter"


def test_written_twice_is_as_written_once() -> None:
    once = between(f"a {BEGIN}{END} b", "new")
    assert between(once, "new") == once


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_without_a_single_place_nothing_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="single"):
        between(text, "new")


def test_documents_and_charts_match_the_stored_results(tmp_path: Path) -> None:
    names = [README, BENCHMARKS, *(CHARTS / name for name in FIGURES)]
    for name in (README, BENCHMARKS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    write(results.load(JSON), tmp_path)
    assert {name: (tmp_path / name).read_text() for name in names} == {
        name: (ROOT / name).read_text() for name in names
    }


def test_every_chart_is_shown() -> None:
    shown = (ROOT / BENCHMARKS).read_text()
    assert all(f"]({name})" in shown for name in FIGURES)
