"""First line printed by `serve`."""

from __future__ import annotations

from pathlib import Path

from deploy.serving.startup_progress import announcement
from deploy.supervisor.child import ServedModel
from tests.deploy.weights import weights

URL = "http://127.0.0.1:8000"


def test_it_says_where_and_what_is_loaded() -> None:
    assert announcement(URL, [ServedModel(name="pocket")]) == f"opening {URL}/v1, loading pocket (3.4 MB)"


def test_of_several_it_says_what_is_loaded_first_and_what_when_asked_for(tmp_path: Path) -> None:
    models = [
        ServedModel(name="a", model=weights(tmp_path / "a", 1000)),
        ServedModel(name="b", model=weights(tmp_path / "b", 2_500_000_000), resident=True),
        ServedModel(name="c", model="org/never-fetched-model", resident=True),
    ]
    line = announcement(URL, models)
    assert line == (f"opening {URL}/v1, loading b (2.5 GB), c (not downloaded yet); on demand: a")
