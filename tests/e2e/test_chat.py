"""Chats over HTTP with real models: streams must equal upstream's answers to single requests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.system import System, running_system

MODELS = ("dense", "hybrid", "sliding")
STREAMS = 16
WORDS = ("steam", "signal", "turntable", "駅", "wagon", "🚂", "tender", "boiler", "café", "雨", "नमस्ते")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a gateway with a worker for each of the three kinds of model."""
    with running_system(tmp_path_factory.mktemp("chat")) as system:
        for name in MODELS:
            system.start_worker("--model", str(model_folder(name)), "--prefill-tokens", "48", module="worker")
        system.wait_loaded(len(MODELS))
        yield system


def random_requests(seed: int) -> list[dict[str, Any]]:
    """Return conversations of very different lengths, one of them a single word."""
    rng = random.Random(seed)
    requests = []
    for number in range(STREAMS):
        length = rng.choice((1, 3, 10, 40, 120))
        text = " ".join(rng.choices(WORDS, k=length))
        messages = [{"role": "user", "content": text}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Answer in one word."})
        requests.append({"messages": messages, "max_tokens": rng.randint(1, 48)})
    return requests


def stream_text(client: openai.OpenAI, **request: Any) -> str:
    chunks = client.chat.completions.create(stream=True, **request)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_streams_begun_at_random_moments_equal_upstream_alone(
    client: openai.OpenAI, oracle: Oracle, name: str
) -> None:
    requests = random_requests(seed=7)
    oracle.ask(model_folder(name), requests)
    expected = [answer["text"] for answer in oracle.hear()]
    moments = random.Random(8)
    begin = threading.Barrier(STREAMS)

    def run(request: dict[str, Any], delay_s: float) -> str:
        begin.wait(30)
        time.sleep(delay_s)
        return stream_text(client, model=name, temperature=0, **request)

    with ThreadPoolExecutor(STREAMS) as pool:
        delays = [moments.uniform(0, 1.0) for _ in requests]
        texts = list(pool.map(run, requests, delays))
    assert texts == expected
    assert len(set(texts)) > STREAMS // 2


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_text_alone_and_in_company(client: openai.OpenAI, name: str) -> None:
    requests = [
        {"messages": [{"role": "user", "content": f"Story {n}"}], "max_tokens": 24, "seed": 100 + n}
        for n in range(8)
    ]
    sampling = {"model": name, "temperature": 0.9, "top_p": 0.95, "extra_body": {"top_k": 50, "min_p": 0.01}}
    alone = [stream_text(client, **request, **sampling) for request in requests]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda request: stream_text(client, **request, **sampling), requests))
    assert together == alone
    other = [stream_text(client, **(r | {"seed": r["seed"] + 50}), **sampling) for r in requests]
    assert other != alone


def test_whole_and_streamed_answers_agree_in_text_and_usage(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "hybrid",
        "messages": [{"role": "user", "content": "こんにちは 🚂"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request)
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 40
    assert whole.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_before_itself_wherever_tokens_divide_it(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "dense",
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": 40,
        "temperature": 0,
    }
    full = client.chat.completions.create(**request).choices[0].message.content or ""
    assert len(full) > 30
    for begin in range(5, len(full) - 4, 3):
        stop = full[begin : begin + 4]
        chunks = list(client.chat.completions.create(stream=True, stop=[stop, "never"], **request))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == full[: full.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_models_are_listed_and_told_apart(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == sorted(MODELS)
    assert client.models.retrieve("dense").id == "dense"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("sparse")


def test_a_prompt_beyond_the_context_is_refused_in_openais_words(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="dense", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in caught.value.message


def test_tools_system_and_tool_results_reach_the_template(client: openai.OpenAI) -> None:
    plain: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    history = [
        {"role": "developer", "content": "Be brief."},
        *plain,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21 degrees"}]},
    ]

    def prompt_tokens(**request: Any) -> int:
        answer = client.chat.completions.create(model="hybrid", max_tokens=1, **request)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    bare = prompt_tokens(messages=plain)
    with_tools = prompt_tokens(messages=plain, tools=[tool])
    assert with_tools > bare + 20
    assert prompt_tokens(messages=plain, tools=[tool], tool_choice="none") == bare
    assert prompt_tokens(messages=history, tools=[tool]) > with_tools + 20
    thinking_off = prompt_tokens(
        messages=plain, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert thinking_off != bare
