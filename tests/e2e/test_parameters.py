"""Request parameters and adapters over HTTP with a real model, compared with upstream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob
from typer.testing import CliRunner

from broker.dialects.parameters import derived_seed
from deploy.command import cli
from tests.models.adapters import Recipe, make_adapter
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.system import System, eventually, running_system

MODEL = "dense"
PROMPT: list[Any] = [{"role": "user", "content": "The turntable at 駅 🚂 turns."}]
TOKENS = 24
RECIPES = {"first": Recipe(4, 3.0, 1), "second": Recipe(8, 2.0, 2, kind="dora"), "late": Recipe(2, 4.0, 3)}
"""Adapters; `late` is loaded while the worker runs."""


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
    with running_system(tmp_path_factory.mktemp("parameters")) as system:
        system.start_ready_worker(*flags, module="worker")
        yield system


def whole(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    fields = {"messages": PROMPT, "max_tokens": TOKENS, "temperature": 0} | fields
    answer = client.chat.completions.create(model=MODEL, **fields)
    assert isinstance(answer, ChatCompletion)
    return answer


def streamed(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    fields = {"messages": PROMPT, "max_tokens": TOKENS, "temperature": 0} | fields
    return list(client.chat.completions.create(model=MODEL, stream=True, **fields))


def texts(answer: ChatCompletion) -> list[str]:
    return [choice.message.content or "" for choice in answer.choices]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def entries(answer: ChatCompletion, index: int = 0) -> list[ChatCompletionTokenLogprob]:
    logprobs = answer.choices[index].logprobs
    return logprobs.content


def test_each_answer_is_the_one_its_seed_gives_alone(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 7, "temperature": 1.0}
    answer = whole(client, **asked)
    seeds = [7, derived_seed(7, 1), derived_seed(7, 2)]
    alone = [texts(whole(client, seed=seed, temperature=1.0))[0] for seed in seeds]
    assert texts(answer) == alone
    assert len(set(alone)) == 3
    chunks = streamed(client, stream_options={"include_usage": True}, **asked)
    assert [text_of(chunks, index) for index in range(3)] == alone
    assert answer.usage.completion_tokens == 3 * TOKENS
    assert answer.usage.prompt_tokens < 2 * TOKENS
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_a_bias_chooses_and_forbids_tokens_that_the_model_has(client: openai.OpenAI) -> None:
    forced = whole(client, logit_bias={"300": 100}, max_tokens=4, logprobs=True)
    assert len({entry.token for entry in entries(forced)}) == 1
    forbidden = whole(client, logit_bias={"300": -100}, max_tokens=4)
    assert entries(forced)[0].token not in texts(forbidden)[0]
    with pytest.raises(openai.BadRequestError, match="999999") as caught:
        whole(client, logit_bias={"999999": 1}, n=2)
    assert caught.value.param == "logit_bias"


def test_a_penalty_changes_the_text_alike_however_it_is_sent(client: openai.OpenAI) -> None:
    # A bias that repeats one token in greedy decoding, unless there is a repetition penalty.
    fields = {"logit_bias": {"300": 3, "301": 2.5, "302": 2}, "max_tokens": 12}
    plain = texts(whole(client, **fields))[0]
    penalties: tuple[dict[str, Any], ...] = (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 2.0}},
    )
    for penalty in penalties:
        penalized = texts(whole(client, **fields, **penalty))[0]
        assert plain != penalized
        assert text_of(streamed(client, **fields, **penalty)) == penalized


def test_logprobs_spell_the_text_and_rank_the_greedy_token_first(client: openai.OpenAI) -> None:
    answer = whole(client, logprobs=True, top_logprobs=5)
    content = entries(answer)
    assert len(content) == TOKENS
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == texts(answer)[0]
    for entry in content:
        ranked = [(top.token, top.logprob) for top in entry.top_logprobs]
        assert ranked[0] == (entry.token, entry.logprob)
        assert [logprob for _, logprob in ranked] == sorted((p for _, p in ranked), reverse=True)
        assert len(ranked) == 5
        assert 0 < sum(math.exp(logprob) for _, logprob in ranked) <= 1.0001


def test_logprobs_are_the_same_streamed_whole_and_among_several(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 5, "n": 2}
    answer, chunks = whole(client, **fields), streamed(client, **fields)
    for index in range(2):
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == index and c.logprobs]
        told = [entry for part in parts for entry in part.content or []]
        assert [(entry.token, entry.bytes) for entry in told] == [
            (entry.token, entry.bytes) for entry in entries(answer, index)
        ]
        for one, other in zip(told, entries(answer, index), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert text_of(chunks) == texts(answer)[0]


def test_the_end_of_an_answer_is_no_token_of_it(client: openai.OpenAI) -> None:
    answer = whole(client, logprobs=True, logit_bias={"1989": 100})
    assert (texts(answer), entries(answer)) == ([""], [])
    assert answer.choices[0].finish_reason == "stop"


# --- adapters ----------------------------------------------------------------------------------------

PROMPTS = ("steam", "signal wagon signal wagon", "turntable " * 40)


def requests() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 12 + number}
        for number, text in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, folders: dict[str, Path]) -> dict[str, list[str]]:
    """Return upstream's answers, by adapter."""
    names = ["", *folders]
    for name in names:
        oracle.ask(model_folder(MODEL), requests(), folders.get(name))
    answers = {name: [answer["text"] for answer in oracle.hear()] for name in names}
    assert len({tuple(texts) for texts in answers.values()}) == len(names)
    return answers


def ask_all(system: System, names: Sequence[str]) -> dict[str, list[str]]:
    """Ask everything at once; return the answers by adapter. Half of the requests name it in a field."""

    def ask(name: str, number: int, body: dict[str, Any]) -> str:
        in_field = {"model": MODEL, "adapter": name}
        named = in_field if name and number % 2 else {"model": f"{MODEL}:{name}" if name else MODEL}
        answer = system.http.post("/v1/chat/completions", json={"temperature": 0, **body, **named})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(len(names) * len(PROMPTS)) as pool:
        asked = {
            name: [pool.submit(ask, name, number, body) for number, body in enumerate(requests())]
            for name in names
        }
    return {name: [each.result() for each in answers] for name, answers in asked.items()}


def test_streams_with_adapters_equal_upstream_alone(system: System, expected: dict[str, list[str]]) -> None:
    names = ["", "first", "second"]
    for _ in range(2):  # the second time from the prefix cache
        assert ask_all(system, names) == {name: expected[name] for name in names}


def test_adapters_are_listed_as_models(system: System, folders: dict[str, Path]) -> None:
    listed = {each["id"]: each for each in system.http.get("/v1/models").json()["data"]}
    assert {MODEL, f"{MODEL}:first", f"{MODEL}:second"} <= listed.keys()
    assert listed[f"{MODEL}:first"]["parent"] == listed[f"{MODEL}:first"]["root"] == MODEL
    assert system.http.get(f"/v1/models/{MODEL}:second").json()["rank"] == 8
    for path in ("/v1/models", "/v1/adapters", "/v1/status"):
        assert str(folders["first"].parent) not in system.http.get(path).text


def command(system: System, *words: str) -> tuple[int, str]:
    """Run `roundhouse adapters`; return its exit status and what it printed."""
    done = CliRunner().invoke(cli.app, ["adapters", *words, "--url", system.url])
    return done.exit_code, done.stdout


def test_an_adapter_comes_survives_its_worker_and_goes(
    system: System, folders: dict[str, Path], expected: dict[str, list[str]], flags: list[str], tmp_path: Path
) -> None:
    """Must be the last test of the module's system, because it kills the worker."""
    broken = system.http.post("/v1/adapters", json={"name": "late", "folder": str(tmp_path)})
    assert broken.status_code == 400
    assert "adapter_config.json" in broken.json()["error"]["message"]
    assert command(system, "add", "late", str(folders["late"])) == (0, f"{MODEL}:late is served\n")
    assert command(system, "add", "late", str(folders["late"]))[0] == 78
    assert f"{MODEL}:late  rank 2" in command(system, "list")[1]
    assert ask_all(system, ["", *folders]) == expected
    assert command(system, "rm", "first") == (0, f"{MODEL}:first is removed\n")
    system.workers[0].kill()
    system.workers[0].wait()
    successor = system.start_ready_worker(*flags, module="worker")
    late = ["late", "second"]
    assert ask_all(system, late) == {name: expected[name] for name in late}
    # The successor has loaded it from its own settings, and was told to remove it.
    gone = system.http.post("/v1/chat/completions", json=requests()[0] | {"model": f"{MODEL}:first"})
    assert gone.status_code == 404
    system.http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).raise_for_status()
    again = {"lora_name": "first", "lora_path": str(folders["first"])}
    eventually(
        lambda: system.http.post("/v1/load_lora_adapter", json=again).status_code == 200,
        within_s=20,
        what="the adapter is loaded again",
    )
    assert ask_all(system, ["first"]) == {"first": expected["first"]}
    successor.stop()
