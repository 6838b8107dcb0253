"""Chats and completions over HTTP with real models: text and logprobs must equal those of upstream alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.utils import load
from openai.types import Completion, CompletionChoice

from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.system import System, running_system

MODELS = ("dense", "hybrid", "sliding")
CHUNK = 48
"""Tokens of a prefill step."""
STREAMS = 16
WORDS = ("steam", "signal", "turntable", "駅", "wagon", "🚂", "tender", "boiler", "café", "雨", "नमस्ते")
TEXT = "The turntable at 駅 🚂 turns, and the signal falls."
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a gateway with a worker for each of the three kinds of model."""
    with running_system(tmp_path_factory.mktemp("chat")) as system:
        for path in map(model_folder, MODELS):
            system.start_worker("--model", str(path), "--prefill-tokens", str(CHUNK), module="worker")
        system.wait_loaded(len(MODELS), within_s=300)
        yield system


def random_requests(seed: int) -> list[dict[str, Any]]:
    """Return conversations of very different lengths, one of them a single word."""
    rng = random.Random(seed)
    requests = []
    for number in range(STREAMS):
        length = rng.choice((1, 3, 10, 20, 60))
        text = " ".join(rng.choices(WORDS, k=length))
        messages = [{"role": "user", "content": text}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Answer in one word."})
        requests.append({"messages": messages, "max_tokens": rng.randint(1, 24)})
    return requests


def stream_text(client: openai.OpenAI, **request: Any) -> str:
    chunks = client.chat.completions.create(stream=True, **request)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_streams_equal_upstream_alone(client: openai.OpenAI, oracle: Oracle, name: str) -> None:
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


def test_the_same_seed_gives_the_same_text_alone_and_in_company(client: openai.OpenAI) -> None:
    requests = [
        {"messages": [{"role": "user", "content": f"Story {n}"}], "max_tokens": 8, "seed": 100 + n}
        for n in range(4)
    ]
    sampling = {
        "model": "hybrid",
        "temperature": 0.9,
        "top_p": 0.95,
        "extra_body": {"top_k": 50, "min_p": 0.01},
    }
    alone = [stream_text(client, **request, **sampling) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: stream_text(client, **request, **sampling), requests))
    assert together == alone
    assert stream_text(client, **(requests[0] | {"seed": 50}), **sampling) != alone[0]


def test_a_stop_string_ends_the_text_before_itself_wherever_tokens_divide_it(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "dense",
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    full = client.chat.completions.create(**request).choices[0].message.content or ""
    assert len(full) > 30
    for begin in range(5, len(full) - 4, 14):
        stop = full[begin : begin + 4]
        chunks = list(client.chat.completions.create(stream=True, stop=[stop, "never"], **request))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == full[: full.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


# --- side requests of agents -------------------------------------------------------------------------

TURNS = 3
AGENT = "You are an agent that reads files and runs commands. " * 24
TITLES = "You write titles of at most six words, and nothing else. " * 12


def billed(prompt: str, number: int) -> str:
    """Return a system prompt like Claude Code's, after a proxy that joins its blocks."""
    return f"x-anthropic-billing-header: cc_version=2.1.330.{number:03x}; cch={number:05x};\n{prompt}"


def test_a_title_asked_for_beside_each_turn_costs_neither_its_prefix(client: openai.OpenAI) -> None:
    def ask(prompt: str, said: list[Any]) -> tuple[str, int, int]:
        """Return the text, and the numbers of prompt tokens and of those that were cached."""
        messages: Any = [{"role": "system", "content": prompt}, *said]
        answer = client.chat.completions.create(
            model="hybrid", messages=messages, max_tokens=6, temperature=0
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached

    said: list[Any] = []
    turn_before, title_before = 0, 0
    for turn in range(TURNS):
        said.append({"role": "user", "content": f"Now read file {turn}, please."})
        title = {"role": "user", "content": f"Generate a title for conversation {turn}."}
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(ask, billed(TITLES, 1000 + turn), [title])
            text, tokens, cached = ask(billed(AGENT, turn), said)
            _, title_tokens, title_cached = beside.result(60)
        # The whole previous turn is cached, and for titles their common prefix.
        assert cached >= turn_before - 1
        assert title_cached >= title_before * 0.8
        turn_before, title_before = tokens, title_tokens
        said.append({"role": "assistant", "content": text})


# --- prompts of token ids, `echo` and prompt logprobs ------------------------------------------------


@cache
def upstream(name: str) -> tuple[Any, Any]:
    model, tokenizer, *_ = load(str(model_folder(name)))
    return model, tokenizer


def encoded(name: str, text: str) -> list[int]:
    return list(upstream(name)[1].encode(text, add_special_tokens=False))


def logprobs_of(name: str, tokens: Sequence[int]) -> list[list[float]]:
    """Return the logprobs of one forward pass, for each position a list by token id."""
    logits = upstream(name)[0](mx.array([list(tokens)]))[0].astype(mx.float32)
    rows: Any = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return list(rows)


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Completion:
    answer = client.completions.create(model=model, **({"max_tokens": 8, "temperature": 0} | fields))
    assert isinstance(answer, Completion)
    return answer


def check_scores(name: str, choice: CompletionChoice, prompt: Sequence[int], answered: int, top: int) -> None:
    """Compare the logprobs of prompt and answer in a choice with one forward pass of upstream."""
    lists = choice.logprobs
    columns = (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)
    assert {len(column) for column in columns} == {len(prompt) + answered}
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
    expected = logprobs_of(name, prompt)
    for position in range(1, len(prompt)):
        row = expected[position - 1]
        assert lists.token_logprobs[position] == pytest.approx(row[prompt[position]], abs=TOLERANCE)
        tops = lists.top_logprobs[position]
        assert max(tops.values()) == pytest.approx(max(row), abs=TOLERANCE)
        assert tops[lists.tokens[position]] == lists.token_logprobs[position]
        assert len(tops) <= top + 1
    for token, start in zip(lists.tokens, lists.text_offset, strict=True):
        is_text = "\\x" not in token and "\ufffd" not in choice.text[start:]
        assert not is_text or choice.text.startswith(token, start) or start == len(choice.text)


def test_token_ids_are_answered_as_the_text_they_stand_for(client: openai.OpenAI) -> None:
    ids = encoded("hybrid", TEXT)
    text = complete(client, "hybrid", prompt=TEXT)
    as_ids = complete(client, "hybrid", prompt=ids)
    assert as_ids.choices[0].text == text.choices[0].text
    assert as_ids.usage.prompt_tokens == len(ids)
    several = complete(client, "hybrid", prompt=[ids, ids[:3]], n=2)
    assert [choice.text for choice in several.choices[:2]] == [text.choices[0].text] * 2
    assert several.choices[2].text == complete(client, "hybrid", prompt=ids[:3]).choices[0].text


def test_reused_tokens_are_those_of_the_text_and_none_of_a_scored_prompt(system: System) -> None:
    ids = encoded("dense", TEXT * 6)
    fields = {"model": "dense", "max_tokens": 2, "temperature": 0}
    system.http.post("/v1/completions", json=fields | {"prompt": TEXT * 6}).raise_for_status()
    answer = system.http.post("/v1/completions", json=fields | {"prompt": ids})
    assert answer.headers["x-roundhouse-cache"].startswith(f"hit={len(ids) - 1}/{len(ids)};")
    scored = system.http.post("/v1/completions", json=fields | {"prompt": ids, "echo": True, "logprobs": 1})
    assert scored.headers["x-roundhouse-cache"] == f"hit=0/{len(ids)}; tier=none; miss=request"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[1], [1, 2, 5000]]}, "prompt[1][2]"),
        ({"prompt": [[5], [5] * 9000]}, "prompt[1]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
    ids=["beyond the vocabulary", "beyond the context", "a model that fills no gaps"],
)
def test_refused_completion_names_the_param(system: System, fields: dict[str, Any], param: str) -> None:
    answer = system.http.post("/v1/completions", json={"model": "dense", "stream": True, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], bool(error["message"])) == ("invalid_request_error", param, True)


def test_an_echo_stands_before_the_answer_or_alone(client: openai.OpenAI) -> None:
    prompt: Any = (ids := encoded("dense", TEXT))
    alone = complete(client, "dense", prompt=prompt).choices[0].text
    answer = complete(client, "dense", prompt=prompt, echo=True)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == (TEXT + alone, None)
    assert answer.usage.completion_tokens == 8
    fields: dict[str, Any] = {"model": "dense", "prompt": prompt, "echo": True, "temperature": 0}
    chunks = list(client.completions.create(max_tokens=8, stream=True, **fields))
    assert chunks[0].choices[0].text == TEXT
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + alone
    for logprobs in (None, 2):
        answer = client.completions.create(max_tokens=0, logprobs=logprobs, **fields)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    check_scores("dense", answer.choices[0], ids, 0, 2)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("dense", 1), ("hybrid", CHUNK + 1), ("sliding", 6 * CHUNK),
    ],
)  # fmt: skip
def test_prompts_are_scored_as_upstream_does(client: openai.OpenAI, name: str, length: int) -> None:
    ids = (encoded(name, TEXT) * 30)[:length]
    answer = complete(client, name, prompt=ids, echo=True, logprobs=3, max_tokens=4)
    check_scores(name, answer.choices[0], ids, 4, 3)
    plain = complete(client, name, prompt=ids, logprobs=3, max_tokens=4)
    assert (answer.choices[0].logprobs.tokens or [])[length:] == plain.choices[0].logprobs.tokens
    assert answer.choices[0].text.endswith(plain.choices[0].text)


def test_scores_are_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": encoded("sliding", TEXT) * 10, "echo": True, "logprobs": 2}
    whole = complete(client, "sliding", **fields).choices[0]
    chunks = list(
        client.completions.create(model="sliding", stream=True, max_tokens=8, temperature=0, **fields)
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert len(parts) > 9  # its prompt is longer than a chunk
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [token for part in parts for token in part.tokens or []] == whole.logprobs.tokens
    assert [place for part in parts for place in part.text_offset or []] == whole.logprobs.text_offset
    told = [each for part in parts for each in part.token_logprobs or []]
    assert told[0] is None
    assert told[1:] == pytest.approx((whole.logprobs.token_logprobs or [])[1:], abs=TOLERANCE)
