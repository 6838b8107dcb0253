"""Answers with several choices and with logprobs, in both of OpenAI's dialects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dialects import answer, chat, completions, renderers
from broker.dialects.logprobs import LegacyLogprobs, chat_logprobs
from broker.dialects.parameters import copies, derived_seed
from broker.dispatch.flight import Batch
from protocol.errors import Code, RequestError
from protocol.types import Delta, Sampling, Timings, TokenLogprob, Usage
from tests import factories
from tests.factories import accepted, failed

finished = partial(factories.finished, prompt=5, tokens=2)
FORMS: dict[str, Callable[[int], answer.ChoiceRenderer]] = {
    "chat": lambda choices: chat.ChatChoiceRenderer(logprobs=True),
    "completions": lambda choices: completions.CompletionChoiceRenderer(logprobs=True, choices=choices),
}


HEAD = {"id": "x"}.copy


def stream(form: answer.ChoiceRenderer, choices: int, prompts: int = 1) -> answer.ChoiceSseRenderer:
    return answer.ChoiceSseRenderer(HEAD, form, choices=choices, prompts=prompts, include_usage=True)


def whole(form: answer.ChoiceRenderer, choices: int, prompts: int = 1) -> answer.ChoiceDocumentRenderer:
    return answer.ChoiceDocumentRenderer(HEAD, form, choices=choices, prompts=prompts)


def delta(text: str, *likelihoods: TokenLogprob) -> Delta:
    return factories.delta(text, likelihoods=[*likelihoods])


def documents(sse: bytes) -> list[Any]:
    data = [event.removeprefix("data: ") for event in sse.decode().split("\n\n") if event[:1] == "d"]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


# --- several choices ---------------------------------------------------------------------------------


def test_every_choice_of_a_stream_is_opened_told_and_closed_under_its_own_index() -> None:
    renderer = stream(chat.ChatChoiceRenderer(logprobs=False), 2)
    sse = renderer.feed([(0, [accepted()]), (1, [accepted(), delta("b")])])
    sse += renderer.feed([(0, [delta("a"), finished(reason="length")])])
    assert not renderer.over
    sse += renderer.feed([(1, [delta("B"), finished(reason="stop", tokens=3)])])
    assert renderer.over
    *chunks, usage, done = documents(sse)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}),
        (0, {"content": "a"}),
        (0, {}),
        (1, {"content": "B"}),
        (1, {}),
    ]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None, None, None, None, "length", None, "stop"]


def test_a_document_is_bounded_and_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers, "DOCUMENT_BYTES_MAX", 1000)
    sse, document = (make(chat.ChatChoiceRenderer(logprobs=False), 2) for make in (stream, whole))
    for choice in range(2):
        for renderer in (sse, document):
            renderer.feed([(choice, [accepted(), delta("x" * 500)])])
    assert documents(sse.feed([(0, [delta("x" * 2000)])]))
    with pytest.raises(RequestError, match="Set 'stream' to true") as caught:
        document.feed([(0, [delta("x")])])
    assert caught.value.kind.status == 500


@pytest.mark.parametrize("make", [stream, whole])
def test_usage_counts_each_prompt_once_and_every_answer(make: Any) -> None:
    form = completions.CompletionChoiceRenderer(logprobs=False, choices=4)
    ends = [
        finished(tokens=1, cached=0),
        finished(tokens=2, cached=4),
        finished(tokens=3, cached=6, prompt=7),
        finished(tokens=4, cached=6, prompt=7),
    ]
    sent = make(form, 4, prompts=2).feed([(choice, [end]) for choice, end in enumerate(ends)])
    document = json.loads(sent) if make is whole else documents(sent)[-2]
    assert document["usage"] == {
        "prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 6},
    }  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_one_failure_ends_a_stream_with_one_error_and_nothing_after_it(name: str) -> None:
    renderer = stream(FORMS[name](3), 3)
    assert renderer.feed([(0, [accepted(), delta("a")])])
    batches: list[Batch] = [(0, [delta("b")]), (1, [accepted(), failed()]), (2, [delta("c"), failed()])]
    *chunks, error, done = documents(renderer.feed(batches))
    assert [text_of(chunk["choices"][0]) for chunk in chunks if chunk["choices"]][:1] == ["b"]
    assert error["error"]["code"] == "engine_error"
    assert done == "[DONE]"
    assert renderer.over
    assert renderer.feed([(0, [delta("late"), finished()])]) == b""


@pytest.mark.parametrize("make", [stream, whole])
def test_a_refusal_of_any_choice_before_the_first_word_has_its_status(make: Any) -> None:
    renderer = make(chat.ChatChoiceRenderer(logprobs=False), 2)
    with pytest.raises(RequestError) as caught:
        renderer.feed([(0, [accepted()]), (1, [failed(code="context_length_exceeded")])])
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED


# --- messages to the worker --------------------------------------------------------------------------


def test_copies_differ_in_id_and_seed_only_and_the_first_is_the_request_itself() -> None:
    request = factories.request("x", sampling=Sampling(seed=7, top_k=3), stop=["a"])
    first, *others = copies(request, 16)
    assert first is request
    assert [other.id for other in others] == [f"x-{choice}" for choice in range(1, 16)]
    for choice, other in enumerate(others, 1):
        sampling = Sampling(seed=derived_seed(7, choice), top_k=3)
        assert other == replace(request, id=f"x-{choice}", sampling=sampling)


def test_derived_seeds_are_always_the_same_and_hardly_ever_meet() -> None:
    assert derived_seed(7, 1) == 7631765994772377903
    seeds = [derived_seed(seed, choice) for seed in range(200) for choice in range(1, 16)]
    assert len({*seeds, *range(200)}) == len(seeds) + 200
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- logprobs ----------------------------------------------------------------------------------------


def likely(spelled: bytes, logprob: float = -0.5, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(bytes=spelled, logprob=logprob, top=[*top])


def test_an_entry_of_a_chat_has_text_bytes_and_the_likeliest() -> None:
    assert chat_logprobs([likely(b" caf\xc3\xa9", -0.25, (b" tea", -0.125), (b" \xf0\x9f", -3.0))]) == {
        "content": [
            {
                "token": " café",
                "logprob": -0.25,
                "bytes": [32, 99, 97, 102, 195, 169],
                "top_logprobs": [
                    {"token": " tea", "logprob": -0.125, "bytes": [32, 116, 101, 97]},
                    {"token": " \\xf0\\x9f", "logprob": -3.0, "bytes": [32, 240, 159]},
                ],
            }
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_logprob_json_cannot_represent_becomes_the_minimum(logprob: float) -> None:
    [entry] = chat_logprobs([likely(b"a", logprob, (b"b", logprob))])["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert LegacyLogprobs().take([likely(b"a", logprob)])["token_logprobs"] == [-9999.0]


def test_a_completion_has_four_lists_with_offsets_in_characters() -> None:
    logprobs = LegacyLogprobs()
    bear = "🐻".encode()
    tokens = [likely(b"ab", -1, (b"ab", -1), (b"x", -2)), likely(bear[:2]), likely(bear[2:]), likely(b"c")]
    first, second = logprobs.take(tokens[:2]), logprobs.take(tokens[2:])
    assert first == {
        "tokens": ["ab", "\\xf0\\x9f"], "token_logprobs": [-1, -0.5],
        "top_logprobs": [{"ab": -1, "x": -2}, {"\\xf0\\x9f": -0.5}], "text_offset": [0, 2],
    }  # fmt: skip
    assert (second["tokens"], second["text_offset"]) == (["\\x90\\xbb", "c"], [2, 3])


@pytest.mark.parametrize("name", FORMS)
def test_a_token_whose_text_is_held_is_reported_at_once_and_only_once(name: str) -> None:
    renderer = stream(FORMS[name](1), 1)
    sse = renderer.feed([(0, [accepted(), delta("", likely(b"\xc3")), delta("é", likely(b"\xa9"))])])
    sse += renderer.feed([(0, [delta("!"), finished()])])
    choices = [chunk["choices"][0] for chunk in documents(sse)[:-1] if chunk["choices"]]
    told = [choice for choice in choices if choice["logprobs"]]
    assert [text_of(choice) for choice in told] == ["", "é"]
    assert "".join(map(text_of, choices)) == "é!"


pieces = st.lists(st.tuples(st.text("aé🐻", max_size=3), st.binary(max_size=4)), max_size=6)


@given(st.lists(pieces, min_size=1, max_size=3), st.data())
@settings(max_examples=50)
@pytest.mark.parametrize("name", FORMS)
def test_streamed_and_whole_answers_say_the_same(
    name: str, told: Sequence[Sequence[tuple[str, bytes]]], data: st.DataObject
) -> None:
    items = [
        [accepted(), *(delta(text, likely(spelled)) for text, spelled in choice), finished(reason="length")]
        for choice in told
    ]
    document = json.loads(whole(FORMS[name](len(told)), len(told)).feed(list(enumerate(items))))
    renderer, sse, rest = stream(FORMS[name](len(told)), len(told)), b"", [list(one) for one in items]
    while not renderer.over:
        choice = data.draw(st.sampled_from([n for n, left in enumerate(rest) if left]))
        count = data.draw(st.integers(1, len(rest[choice])))
        sse += renderer.feed([(choice, rest[choice][:count])])
        rest[choice] = rest[choice][count:]
    *chunks, usage, done = documents(sse)
    assert done == "[DONE]"
    assert usage["usage"] == document["usage"]
    for index, choice in enumerate(document["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        text = choice["message"]["content"] if name == "chat" else choice["text"]
        assert "".join(map(text_of, mine)) == text
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
        for field in choice["logprobs"].keys() - {"refusal"}:
            parts = [one["logprobs"][field] for one in mine if one["logprobs"]]
            assert [entry for part in parts for entry in part] == choice["logprobs"][field]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_last_chunk_has_the_timings_of_llama_cpp_and_the_model_that_continues(
    name: str, include_usage: bool
) -> None:
    usage = Usage(
        prompt_tokens=100, completion_tokens=40, cached_tokens=60, accepted_tokens=6, rejected_tokens=2
    )
    timings = Timings(queued_s=1.0, prefill_s=0.5, decode_s=2.0)
    end = finished(usage=usage, timings=timings, reason="length", continued_by='small, "alone"')
    items: list[Batch] = [(0, [accepted(), delta("a"), end])]
    renderer = answer.ChoiceSseRenderer(HEAD, FORMS[name](1), choices=1, include_usage=include_usage)
    *chunks, last, _ = documents(renderer.feed(items))
    document = json.loads(whole(FORMS[name](1), 1).feed(items))
    assert not any("timings" in chunk for chunk in chunks)
    assert last["timings"] == document["timings"] == {
        "cache_n": 60, "prompt_n": 40, "prompt_ms": 500.0, "prompt_per_token_ms": 12.5,
        "prompt_per_second": 80.0, "predicted_n": 40, "predicted_ms": 2000.0,
        "predicted_per_token_ms": 50.0, "predicted_per_second": 20.0, "draft_n": 8, "draft_n_accepted": 6,
    }  # fmt: skip
    [closing] = [chunk for chunk in (*chunks, last) if "continued_by" in chunk]
    assert closing["choices"][0]["finish_reason"] == "length"
    assert closing["continued_by"] == document["continued_by"] == 'small, "alone"'


def test_timings_are_left_out_where_they_are_not_known() -> None:
    items: list[Batch] = [(0, [accepted(), delta("a"), finished()])]
    document = json.loads(whole(FORMS["chat"](1), 1).feed(items))
    assert not {"timings", "continued_by"} & document.keys()
    timed = finished(timings=Timings(prefill_s=0.5))
    two: list[Batch] = [(0, [accepted(), timed]), (1, [accepted(), timed])]
    assert "timings" not in json.loads(whole(FORMS["chat"](2), 2).feed(two))
    instant = json.loads(whole(FORMS["chat"](1), 1).feed(two[:1]))
    assert instant["timings"]["predicted_per_second"] == 0.0
