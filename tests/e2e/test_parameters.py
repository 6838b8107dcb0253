"""Request parameters over HTTP with a real model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob

from broker.dialects.parameters import derived_seed
from tests.models.fixtures import model_folder
from tests.system import System, running_system

PROMPT: list[Any] = [{"role": "user", "content": "The turntable at 駅 🚂 turns."}]
TOKENS = 24


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("parameters")) as system:
        system.start_worker("--model", str(model_folder("dense")), module="worker")
        system.wait_ready()
        yield system


def whole(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    fields = {"messages": PROMPT, "max_tokens": TOKENS, "temperature": 0} | fields
    answer = client.chat.completions.create(model="dense", **fields)
    assert isinstance(answer, ChatCompletion)
    return answer


def streamed(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    fields = {"messages": PROMPT, "max_tokens": TOKENS, "temperature": 0} | fields
    return list(client.chat.completions.create(model="dense", stream=True, **fields))


def texts(answer: ChatCompletion) -> list[str]:
    return [choice.message.content or "" for choice in answer.choices]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def entries(answer: ChatCompletion, index: int = 0) -> list[ChatCompletionTokenLogprob]:
    logprobs = answer.choices[index].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return logprobs.content


# --- several choices ---------------------------------------------------------------------------------


def test_each_answer_is_the_one_its_seed_gives_alone(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 7, "temperature": 1.0}
    answer = whole(client, **asked)
    seeds = [7, derived_seed(7, 1), derived_seed(7, 2)]
    alone = [texts(whole(client, seed=seed, temperature=1.0))[0] for seed in seeds]
    assert texts(answer) == alone
    assert len(set(alone)) == 3
    chunks = streamed(client, stream_options={"include_usage": True}, **asked)
    assert [text_of(chunks, index) for index in range(3)] == alone
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * TOKENS
    assert answer.usage.prompt_tokens < 2 * TOKENS
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_greedy_answers_to_one_request_are_equal(client: openai.OpenAI) -> None:
    assert texts(whole(client, n=4)) == texts(whole(client)) * 4


def test_many_answers_in_company_are_those_alone(client: openai.OpenAI) -> None:
    first = client.completions.create(
        model="dense", prompt=["steam", "雨 🚂"], n=2, seed=3, temperature=1, max_tokens=12
    )
    alone = [
        client.completions.create(model="dense", prompt=prompt, seed=seed, temperature=1, max_tokens=12)
        for prompt in ("steam", "雨 🚂")
        for seed in (3, derived_seed(3, 1))
    ]
    assert [choice.text for choice in first.choices] == [one.choices[0].text for one in alone]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert first.usage is not None
    assert first.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[::2] if one.usage)


def test_a_prompt_beyond_the_context_is_one_refusal(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="dense", messages=messages, n=3, stream=stream)
        assert caught.value.code == "context_length_exceeded"


# --- biases and penalties ----------------------------------------------------------------------------


def test_a_bias_chooses_and_forbids_tokens(client: openai.OpenAI) -> None:
    forced = whole(client, logit_bias={"300": 100}, max_tokens=4, logprobs=True)
    assert len({entry.token for entry in entries(forced)}) == 1
    forbidden = whole(client, logit_bias={"300": -100}, max_tokens=4)
    assert entries(forced)[0].token not in texts(forbidden)[0]


def test_a_bias_for_a_token_that_the_model_has_not_is_refused(client: openai.OpenAI) -> None:
    bias = {"999999": 1}
    with pytest.raises(openai.BadRequestError, match="999999") as caught:
        whole(client, logit_bias=bias, n=2)
    assert caught.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError, match="999999") as caught:
        client.completions.create(model="dense", prompt="a", logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 2.0}},
    ],
    ids=str,
)
def test_a_penalty_changes_the_text_alike_however_it_is_sent(
    client: openai.OpenAI, penalty: dict[str, Any]
) -> None:
    # A bias that repeats one token in greedy decoding, unless there is a repetition penalty.
    fields = {"logit_bias": {"300": 3, "301": 2.5, "302": 2}, "max_tokens": 12}
    plain, penalized = (texts(whole(client, **fields, **more))[0] for more in ({}, penalty))
    assert plain != penalized
    assert text_of(streamed(client, **fields, **penalty)) == penalized


# --- logprobs ----------------------------------------------------------------------------------------


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


def test_without_being_asked_nothing_is_reported(client: openai.OpenAI) -> None:
    assert whole(client).choices[0].logprobs is None
    assert all(choice.logprobs is None for chunk in streamed(client) for choice in chunk.choices)


def test_the_end_of_an_answer_is_no_token_of_it(client: openai.OpenAI) -> None:
    answer = whole(client, logprobs=True, logit_bias={"1989": 100})
    assert (texts(answer), entries(answer)) == ([""], [])
    assert answer.choices[0].finish_reason == "stop"


def test_a_completion_has_the_four_lists(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "dense", "prompt": "雨 🚂", "temperature": 0, "max_tokens": TOKENS}
    answer = client.completions.create(logprobs=3, **asked).choices[0]
    lists = answer.logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert lists.top_logprobs is not None
    assert lists.text_offset is not None
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == TOKENS
    for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    for (token, start), (_, end) in itertools.pairwise(zip(lists.tokens, lists.text_offset, strict=True)):
        assert answer.text[start:end] == token or token.startswith("\\x") or "\ufffd" in token
    chunks = list(client.completions.create(logprobs=3, stream=True, **asked))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset or []] == lists.text_offset
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.text
