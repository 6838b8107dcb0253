"""Which models `serve` is told to serve, what they are called, and what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.serving.models import memory_budget, read
from deploy.supervisor.models import ServedModel
from protocol.settings import SettingsError
from tests.deploy.weights import weights


def config(folder: Path, text: str) -> str:
    file = folder / "roundhouse.toml"
    file.write_text(text)
    return str(file)


def test_where_none_is_named_the_embedded_one_is_served() -> None:
    assert read((), None) == [ServedModel(name="pocket")]


def test_one_is_called_by_its_id_its_folder_or_the_name_it_is_given(tmp_path: Path) -> None:
    folder = weights(tmp_path / "large", 1)
    found = read(("org/a", folder, "small=org/b", f"big={folder}"), None)
    assert [(model.name, model.model) for model in found] == [
        ("org/a", "org/a"),
        ("large", folder),
        ("small", "org/b"),
        ("big", folder),
    ]


def test_a_folder_whose_name_has_an_equals_sign_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(tmp_path / "a=b", 1)
    monkeypatch.chdir(tmp_path)
    assert read(("a=b",), None) == [ServedModel(name="a=b", model="a=b")]


def test_those_named_come_before_those_of_the_file_and_win_over_them(tmp_path: Path) -> None:
    file = config(
        tmp_path, '[models.a]\nmodel = "org/a"\naliases = ["x"]\nmax_running = 2\n[models.b]\nresident = true'
    )
    first, second, third = read(("c=org/c", "a=org/other"), file)
    assert first == ServedModel(name="c", model="org/c", named=True)
    assert second == ServedModel(
        name="a", model="org/other", named=True, aliases=("x",), settings={"max_running": 2}
    )
    assert third == ServedModel(name="b", named=True, resident=True)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        '[models.a]\naliases = "x"\n[models.b]\nresident = 1\n[models.c]\naliases = ["d"]\n[models.d]\n'
        '[models."e]"]\n[models.f]\nmax_running = [1]',
    )
    with pytest.raises(SettingsError) as caught:
        read((), file)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].split()[-1] for line in lines] == [
        "[models.a]",
        "[models.b]",
        "[models.f]",
        "'e]'",
        "'d'",
    ]
    assert "the name of two" in lines[-1]


def test_models_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"as \[models.NAME\]"):
        read((), config(tmp_path, 'models = "a"'))
    with pytest.raises(SettingsError, match=r"\[models.a\]"):
        read((), config(tmp_path, 'models.a = "b"'))


def test_one_model_takes_what_it_needs_and_several_share_a_part_of_the_machine() -> None:
    one, two = [ServedModel(name="a")], [ServedModel(name="a"), ServedModel(name="b")]
    assert memory_budget(None, one) is None
    assert memory_budget(10**9, one) == 10**9
    assert memory_budget(10**9, two) == 10**9
    share = memory_budget(None, two)
    assert share is not None
    assert share > 10**8


def test_residents_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    models = [
        ServedModel(name=name, model=weights(tmp_path / name, 1000), resident=True) for name in ("a", "b")
    ]
    assert memory_budget(2000, models) == 2000
    with pytest.raises(SettingsError, match="the resident models take 2000 bytes"):
        memory_budget(1999, models)
