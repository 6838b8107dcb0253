"""Prompts of token ids, `echo`, prompt logprobs and infilling over HTTP, compared with upstream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest
from mlx_lm.utils import load
from openai.types import Completion, CompletionChoice

from tests.models.fixtures import model_folder
from tests.models.infill import infill_folder
from tests.system import System, running_system

MODELS = ("dense", "hybrid", "sliding")
TOLERANCE = 1e-4
TEXT = "The turntable at 駅 🚂 turns, and the signal falls."


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("scoring")
    infilling = infill_folder(folder / "infilling")
    with running_system(folder) as system:
        for name in MODELS:
            system.start_worker("--model", str(model_folder(name)), "--prefill-tokens", "64", module="worker")
        system.start_worker("--model", str(infilling), module="worker")
        system.wait_loaded(4)
        yield system


@cache
def upstream(name: str) -> tuple[Any, Any]:
    model, tokenizer, *_ = load(str(model_folder(name)))
    return model, tokenizer


def encoded(name: str, text: str) -> list[int]:
    return list(upstream(name)[1].encode(text, add_special_tokens=False))


def logprobs_of(name: str, tokens: Sequence[int]) -> mx.array:
    """Return the logprobs of one forward pass, of shape [positions, vocabulary]."""
    logits = upstream(name)[0](mx.array([list(tokens)]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def asked(client: openai.OpenAI, model: str, **fields: Any) -> Completion:
    answer = client.completions.create(model=model, **({"max_tokens": 8, "temperature": 0} | fields))
    assert isinstance(answer, Completion)
    return answer


def check_scores(name: str, choice: CompletionChoice, prompt: Sequence[int], answered: int, top: int) -> None:
    """Compare the logprobs of prompt and answer in a choice with one forward pass of upstream."""
    lists = choice.logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert lists.top_logprobs is not None
    assert lists.text_offset is not None
    lengths = {
        len(each) for each in (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)
    }
    assert lengths == {len(prompt) + answered}
    assert lists.token_logprobs[0] is None
    assert lists.top_logprobs[0] is None
    expected = logprobs_of(name, prompt)
    for position in range(1, len(prompt)):
        row = expected[position - 1]
        assert lists.token_logprobs[position] == pytest.approx(row[prompt[position]].item(), abs=TOLERANCE)
        tops = lists.top_logprobs[position]
        assert max(tops.values()) == pytest.approx(mx.max(row).item(), abs=TOLERANCE)
        assert tops[lists.tokens[position]] == lists.token_logprobs[position]
        assert len(tops) <= top + 1
    for token, start in zip(lists.tokens, lists.text_offset, strict=True):
        is_text = "\\x" not in token and "\ufffd" not in choice.text[start:]
        assert not is_text or choice.text.startswith(token, start) or start == len(choice.text)


# --- token ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_token_ids_are_answered_as_the_text_they_stand_for(client: openai.OpenAI, name: str) -> None:
    ids = encoded(name, TEXT)
    text = asked(client, name, prompt=TEXT)
    as_ids = asked(client, name, prompt=ids)
    assert as_ids.choices[0].text == text.choices[0].text
    assert as_ids.usage is not None
    assert as_ids.usage.prompt_tokens == len(ids)
    several = asked(client, name, prompt=[ids, ids[:3]], n=2)
    assert [choice.text for choice in several.choices[:2]] == [text.choices[0].text] * 2
    assert several.choices[2].text == asked(client, name, prompt=ids[:3]).choices[0].text


def test_token_ids_find_the_prefix_that_their_text_has_left(system: System) -> None:
    ids = encoded("dense", TEXT * 6)
    fields = {"model": "dense", "max_tokens": 2, "temperature": 0}
    system.http.post("/v1/completions", json=fields | {"prompt": TEXT * 6}).raise_for_status()
    answer = system.http.post("/v1/completions", json=fields | {"prompt": ids})
    assert answer.headers["x-roundhouse-cache"].startswith(f"hit={len(ids) - 1}/{len(ids)};")


REFUSED = {
    "a token beyond the vocabulary": ({"prompt": [1, 5000]}, "prompt[1]"),
    "one in a list of lists": ({"prompt": [[1], [1, 2, 5000]]}, "prompt[1][2]"),
    "a negative one": ({"prompt": [-1]}, "prompt[0]"),
    "no tokens": ({"prompt": [[1], []]}, "prompt[1]"),
    "texts among tokens": ({"prompt": [1, "a"]}, "prompt[1]"),
    "tokens among texts": ({"prompt": ["a", [1]]}, "prompt"),
    "beyond the context": ({"prompt": [[5], [5] * 9000]}, "prompt[1]"),
    "nothing at all": ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
    "a gap in a model that fills none": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "a gap said back": ({"prompt": "a", "suffix": "b", "echo": True}, "echo"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_invalid_request_error_names_the_param(
    system: System, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = system.http.post("/v1/completions", json={"model": "dense", "stream": stream, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


# --- echo --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [TEXT, encoded("dense", TEXT)], ids=["text", "ids"])
def test_the_prompt_stands_before_the_answer_streamed_and_whole(client: openai.OpenAI, prompt: Any) -> None:
    alone = asked(client, "dense", prompt=prompt).choices[0].text
    answer = asked(client, "dense", prompt=prompt, echo=True)
    assert answer.choices[0].text == TEXT + alone
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    chunks = list(
        client.completions.create(
            model="dense", prompt=prompt, echo=True, max_tokens=8, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].text == TEXT
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + alone


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("prompt", [TEXT, encoded("dense", TEXT)], ids=["text", "ids"])
def test_without_tokens_to_come_the_prompt_is_all(
    client: openai.OpenAI, prompt: Any, fields: dict[str, Any]
) -> None:
    answer = asked(client, "dense", prompt=prompt, echo=True, max_tokens=0, **fields)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert answer.usage is not None
    ids = encoded("dense", TEXT)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    if fields:
        check_scores("dense", choice, ids, 0, 2)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 300])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_scored_as_upstream_does_whatever_their_length(
    client: openai.OpenAI, name: str, length: int
) -> None:
    ids = (encoded(name, TEXT) * 30)[:length]
    answer = asked(client, name, prompt=ids, echo=True, logprobs=3, max_tokens=4)
    check_scores(name, answer.choices[0], ids, 4, 3)
    plain = asked(client, name, prompt=ids, logprobs=3, max_tokens=4)
    assert plain.choices[0].logprobs is not None
    assert answer.choices[0].logprobs is not None
    assert (answer.choices[0].logprobs.tokens or [])[length:] == plain.choices[0].logprobs.tokens
    assert answer.choices[0].text.endswith(plain.choices[0].text)


def test_several_answers_to_several_prompts_each_have_their_prompts_scores(client: openai.OpenAI) -> None:
    prompts = [encoded("hybrid", TEXT) * 6, encoded("hybrid", "駅")]
    answer = asked(client, "hybrid", prompt=prompts, n=3, echo=True, logprobs=1, temperature=1, seed=3)
    for index, choice in enumerate(answer.choices):
        check_scores("hybrid", choice, prompts[index // 3], 8, 1)


def test_scores_are_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    prompt = encoded("sliding", TEXT) * 10
    fields: dict[str, Any] = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 5,
        "temperature": 0,
    }
    whole = asked(client, "sliding", **fields).choices[0]
    chunks = list(client.completions.create(model="sliding", stream=True, **fields))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert len(parts) > 6  # its prompt is longer than a chunk
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    assert [token for part in parts for token in part.tokens or []] == whole.logprobs.tokens
    assert [place for part in parts for place in part.text_offset or []] == whole.logprobs.text_offset
    told = [each for part in parts for each in part.token_logprobs or []]
    assert told[0] is None
    assert told[1:] == pytest.approx((whole.logprobs.token_logprobs or [])[1:], abs=TOLERANCE)


def test_a_scored_prompt_says_why_nothing_of_it_was_reused(system: System) -> None:
    ids = encoded("dense", TEXT * 7)
    fields = {"model": "dense", "prompt": ids, "max_tokens": 1, "temperature": 0}
    system.http.post("/v1/completions", json=fields).raise_for_status()
    answer = system.http.post("/v1/completions", json=fields | {"echo": True, "logprobs": 1})
    assert answer.headers["x-roundhouse-cache"] == f"hit=0/{len(ids)}; tier=none; miss=scored"


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize("name", MODELS)
def test_a_multiple_choice_question_is_decided_as_upstream_would(
    client: openai.OpenAI, name: str, as_text: bool
) -> None:
    """Like lm-eval's `local-completions`: one token is sampled and excluded from the sum."""
    context = "Question: what turns at the 駅?\nAnswer:"
    scores, expected = [], []
    for continuation in (" the turntable", " seventeen whistles of steam"):
        begin, ids = encoded(name, context), encoded(name, context + continuation)
        prompt: Any = context + continuation if as_text else [ids]
        [choice] = asked(client, name, prompt=prompt, echo=True, logprobs=1, max_tokens=1).choices
        assert choice.logprobs is not None
        told = (choice.logprobs.token_logprobs or [])[len(begin) : -1]
        assert len(told) == len(ids) - len(begin)
        scores.append(sum(each for each in told if each is not None))
        rows = logprobs_of(name, ids)
        expected.append(sum(rows[at - 1, ids[at]].item() for at in range(len(begin), len(ids))))
        tops = (choice.logprobs.top_logprobs or [])[len(begin) : -1]
        greedy = all(
            max(top, key=lambda token: top[token]) == token
            for top, token in zip(tops, (choice.logprobs.tokens or [])[len(begin) : -1], strict=True)
            if top
        )
        best = [int(mx.argmax(rows[at - 1]).item()) for at in range(len(begin), len(ids))]
        assert greedy == (best == ids[len(begin) :])
    assert scores == pytest.approx(expected, abs=1e-3)
    assert (scores[0] > scores[1]) == (expected[0] > expected[1])


def test_an_answer_that_ends_at_once_leaves_the_sum_in_place(client: openai.OpenAI) -> None:
    ids = encoded("dense", TEXT)
    bias = {"1989": 100}
    [choice] = asked(
        client, "dense", prompt=ids, echo=True, logprobs=1, max_tokens=1, logit_bias=bias
    ).choices
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    check_scores("dense", choice, ids, 1, 1)


# --- infilling ---------------------------------------------------------------------------------------


def test_a_gap_is_filled_as_its_marked_prompt_goes_on(client: openai.OpenAI) -> None:
    marked = "<|fim_prefix|>def f():\n    <|fim_suffix|>\n    return 1<|fim_middle|>"
    fields: dict[str, Any] = {"prompt": "def f():\n    ", "suffix": "\n    return 1"}
    answer = asked(client, "infilling", **fields)
    assert answer.choices[0].text == asked(client, "infilling", prompt=marked).choices[0].text
    chunks = client.completions.create(model="infilling", stream=True, max_tokens=8, temperature=0, **fields)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert answer.usage is not None
    assert (
        answer.usage.prompt_tokens
        == len(encoded("dense", "def f():\n    ")) + len(encoded("dense", "\n    return 1")) + 3
    )


def test_no_number_of_a_scored_prompt_is_one_that_json_has_not(system: System) -> None:
    body = {"model": "dense", "prompt": [1, 2, 3], "echo": True, "logprobs": 5, "max_tokens": 1}
    answer: httpx.Response = system.http.post("/v1/completions", json=body)
    lists = answer.json()["choices"][0]["logprobs"]
    numbers = [
        *lists["token_logprobs"][1:],
        *(each for top in lists["top_logprobs"][1:] for each in top.values()),
    ]
    assert all(math.isfinite(number) for number in numbers)
