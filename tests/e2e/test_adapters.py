"""Adapters over HTTP with a real model: each stream says what upstream says with that adapter loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from deploy.command import cli
from tests.models.adapters import Recipe, make_adapter
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.system import System, eventually, running_system

MODEL = "dense"
RECIPES = {"first": Recipe(4, 3.0, 1), "second": Recipe(8, 2.0, 2, kind="dora"), "late": Recipe(2, 4.0, 3)}
"""`late` is loaded while the worker runs."""
PROMPTS = ("steam", "signal wagon signal wagon", "turntable " * 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(model_folder(MODEL), folder / name, each) for name, each in RECIPES.items()}


@pytest.fixture(scope="module")
def flags(folders: dict[str, Path]) -> list[str]:
    named = [word for name in ("first", "second") for word in ("--adapter", f"{name}={folders[name]}")]
    return ["--model", str(model_folder(MODEL)), "--prefill-tokens", "48", *named]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("system")) as system:
        system.start_worker(*flags, module="worker")
        system.wait_ready()
        yield system


def requests(adapter: str) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 12 + number}
        for number, text in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, folders: dict[str, Path]) -> dict[str, list[str]]:
    """Return upstream's answers, by adapter."""
    names = ["", *folders]
    for name in names:
        oracle.ask(model_folder(MODEL), requests(name), folders.get(name))
    answers = {name: [answer["text"] for answer in oracle.hear()] for name in names}
    assert len({tuple(texts) for texts in answers.values()}) == len(names)
    return answers


def ask(system: System, body: dict[str, Any]) -> str:
    answer = system.http.post("/v1/chat/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def ask_all(system: System, names: Sequence[str]) -> dict[str, list[str]]:
    """Ask everything at once; return the answers by adapter. Half of the requests name it in a field."""
    bodies = []
    for name in names:
        for number, body in enumerate(requests(name)):
            if name and number % 2:
                body |= {"model": MODEL, "adapter": name}
            else:
                body |= {"model": f"{MODEL}:{name}" if name else MODEL}
            bodies.append(body)
    with ThreadPoolExecutor(len(bodies)) as pool:
        texts = list(pool.map(lambda body: ask(system, body), bodies))
    count = len(PROMPTS)
    return {name: texts[count * place : count * (place + 1)] for place, name in enumerate(names)}


def test_streams_with_different_adapters_equal_upstream_with_each_alone(
    system: System, expected: dict[str, list[str]]
) -> None:
    names = ["", "first", "second"]
    for _ in range(2):  # the second time from the prefix cache
        assert ask_all(system, names) == {name: expected[name] for name in names}


def test_adapters_are_listed_as_models(system: System, folders: dict[str, Path]) -> None:
    listed = {each["id"]: each for each in system.http.get("/v1/models").json()["data"]}
    assert {MODEL, f"{MODEL}:first", f"{MODEL}:second"} <= listed.keys()
    assert listed[f"{MODEL}:first"]["parent"] == listed[f"{MODEL}:first"]["root"] == MODEL
    assert system.http.get(f"/v1/models/{MODEL}:second").json()["rank"] == 8
    assert system.http.get(f"/v1/models/{MODEL}:none").status_code == 404
    for path in ("/v1/models", "/v1/adapters", "/v1/status"):
        assert str(folders["first"].parent) not in system.http.get(path).text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_every_dialect_knows_adapters(system: System, path: str, body: dict[str, Any]) -> None:
    answer = system.http.post(path, json=body | {"model": f"{MODEL}:first", "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == f"{MODEL}:first"
    for wrong in ({"model": f"{MODEL}:none"}, {"model": MODEL, "adapter": "none"}):
        refused = system.http.post(path, json=body | wrong)
        assert refused.status_code == 404
        assert "none" in refused.json()["error"]["message"]
    both = system.http.post(path, json=body | {"model": f"{MODEL}:first", "adapter": "second"})
    assert both.status_code == 400


def add(system: System, name: str, folder: Path) -> httpx.Response:
    return system.http.post("/v1/adapters", json={"name": name, "folder": str(folder)})


def command(system: System, *words: str) -> tuple[int, str]:
    """Run `roundhouse adapters`; return its exit status and what it printed."""
    done = CliRunner().invoke(cli.app, ["adapters", *words, "--url", system.url])
    return done.exit_code, done.stdout


def test_an_adapter_comes_survives_its_worker_and_goes(
    system: System, folders: dict[str, Path], expected: dict[str, list[str]], flags: list[str], tmp_path: Path
) -> None:
    broken = add(system, "late", tmp_path)
    assert broken.status_code == 400
    assert "adapter_config.json" in broken.json()["error"]["message"]
    assert command(system, "add", "late", str(folders["late"])) == (0, f"{MODEL}:late is served\n")
    assert command(system, "add", "late", str(folders["late"]))[0] == 78
    assert f"{MODEL}:late  rank 2" in command(system, "list")[1]
    names = ["", *folders]
    assert ask_all(system, names) == expected
    assert command(system, "rm", "first") == (0, f"{MODEL}:first is removed\n")
    system.workers[0].kill()
    system.workers[0].wait()
    successor = system.start_worker(*flags, module="worker")
    try:
        system.wait_ready()
        late = ["late", "second"]
        assert ask_all(system, late) == {name: expected[name] for name in late}
        # The successor has loaded it from its own settings, and was told to remove it.
        gone = system.http.post("/v1/chat/completions", json=requests("")[0] | {"model": f"{MODEL}:first"})
        assert gone.status_code == 404
        system.http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).raise_for_status()
        again = {"lora_name": "first", "lora_path": str(folders["first"])}
        eventually(
            lambda: system.http.post("/v1/load_lora_adapter", json=again).status_code == 200,
            within_s=20,
            what="the adapter is loaded again",
        )
        assert ask_all(system, ["first"]) == {"first": expected["first"]}
    finally:
        successor.stop()
