"""Legacy completions: validation of bodies, messages to the worker, and rendered answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.completions import completions
from broker.api.completions.completions import Echo
from broker.dialects import choices as answer
from broker.dialects.parameters import derived_seed
from protocol.errors import Code, RequestError
from protocol.messages import Finished, Generate, PromptLogprobs
from protocol.types import PromptToken, Sampling, TokenLogprob
from tests.factories import accepted, delta, finished


def sent(**fields: Any) -> list[Generate]:
    body = completions.read(json.dumps({"prompt": "Once", **fields}).encode())
    return completions.generate(body, id="cmpl-1", incarnation="gateway")


UNSUPPORTED = {
    "echo": {"echo": True, "suffix": "the end"}, "best_of": {"best_of": 3}, "min_tokens": {"min_tokens": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 6, "n": 3}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
        ({"echo": True, "max_tokens": -2}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        *((fields, param) for param, fields in UNSUPPORTED.items()),
    ],
)
def test_a_field_that_is_wrong_or_unsupported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        sent(**fields)
    code = Code.UNSUPPORTED_PARAMETER if fields is UNSUPPORTED.get(param) else Code.INVALID_REQUEST
    assert (caught.value.code, caught.value.param) == (code, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False, "suffix": "", "best_of": 1, "min_tokens": 0, "user": "me", "later": [1]},
        {"prompt": ["Once"]},
        {"echo": True},
        {name: None for name in completions.Body.__struct_fields__ if name not in ("prompt", "seed")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_nothing_is_not_told_to_the_worker(fields: dict[str, Any]) -> None:
    """A text is echoed without the worker."""
    bare = Generate(
        incarnation="gateway", id="cmpl-1", sampling=Sampling(seed=1), prompt="Once", max_tokens=16
    )
    assert sent(seed=1, **fields) == [bare]


def test_every_parameter_arrives() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    raw = fields | {
        "logit_bias": {"3": 1}, "logprobs": 5, "stop": "a", "max_tokens": 64, "ignore_eos": True,
        "priority": 2, "cache_salt": "tenant", "cache_pin": True,
    }  # fmt: skip
    assert sent(**raw) == [
        Generate(
            incarnation="gateway", id="cmpl-1",
            sampling=Sampling(**fields, logit_bias={3: 1.0}, logprobs=5),  # type: ignore[arg-type]
            prompt="Once", stop=["a"], max_tokens=64, ignore_eos=True, priority=2, cache_salt="tenant",
            cache_pin=True,
        )
    ]  # fmt: skip


def test_each_prompt_has_its_choices_side_by_side_with_the_seeds_it_would_have_alone() -> None:
    requests = sent(prompt=["a", "b"], n=2, best_of=2, seed=7, cache_salt="tenant", cache_pin=True)
    assert [(request.cache_salt, request.cache_pin) for request in requests] == [("tenant", True)] * 4
    assert [request.prompt for request in requests] == ["a", "a", "b", "b"]
    assert [request.sampling.seed for request in requests] == [7, derived_seed(7, 1)] * 2
    assert len({request.id for request in requests}) == 4


def test_token_ids_and_suffixes_arrive_as_they_are() -> None:
    [one] = sent(prompt=[5, 0, 2**31 - 1])
    assert (one.tokens, one.prompt, one.source) == ([5, 0, 2**31 - 1], None, "prompt")
    several = sent(prompt=[[1, 2], [3]], n=2)
    assert [request.tokens for request in several] == [[1, 2], [1, 2], [3], [3]]
    assert [request.source for request in several] == ["prompt[0]"] * 2 + ["prompt[1]"] * 2
    assert [request.source for request in sent(prompt=["a", "b"])] == ["prompt[0]", "prompt[1]"]
    [filled] = sent(suffix="    return x")
    assert (filled.prompt, filled.suffix) == ("Once", "    return x")


def test_an_echo_of_tokens_is_asked_of_the_worker() -> None:
    for fields in ({"logprobs": 0}, {"max_tokens": 0}, {"prompt": [1, 2]}):
        [request] = sent(echo=True, **fields)
        assert (request.echo, request.max_tokens) == (True, fields.get("max_tokens", 16))


def told(items: list[Any], *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a document, or of each event of a stream, for the worker output `items`."""
    body = completions.read(json.dumps({"prompt": "ab", "echo": True, **fields}).encode())
    form = completions.CompletionChoiceRenderer(
        logprobs=body.logprobs is not None, choices=1, echoes=completions.echoes(body)
    )
    if not stream:
        whole = json.loads(answer.ChoiceDocumentRenderer(dict, form, choices=1).feed([(0, items)]))
        return list(whole["choices"])
    renderer = answer.ChoiceSseRenderer({"id": "x"}.copy, form, choices=1, include_usage=False)
    sse = renderer.feed([(0, items)]).decode()
    events = [event[6:] for event in sse.split("\n\n") if event.startswith("data: {")]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def end(completion_tokens: int) -> Finished:
    return finished(tokens=completion_tokens, prompt=2, reason="length")


def test_an_echo_with_logprobs_has_the_prompts_tokens_before_the_answers() -> None:
    items = [
        accepted(), PromptLogprobs(incarnation="w", id="x", first=0, tokens=[PromptToken(bytes=b"a")]),
        PromptLogprobs(
            incarnation="w", id="x", first=1, tokens=[PromptToken(bytes=b"b", logprob=-2, top=[(b"B", -1.0)])]
        ),
        delta("c", likelihoods=[TokenLogprob(bytes=b"c", logprob=-3)]), end(1),
    ]  # fmt: skip
    [choice] = told(items, stream=False, logprobs=1)
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"], "token_logprobs": [None, -2, -3],
        "top_logprobs": [None, {"B": -1.0, "b": -2}, {"c": -3}], "text_offset": [0, 1, 2],
    }  # fmt: skip
    events = told(items, stream=True, logprobs=1)
    assert "".join(event["text"] for event in events) == "abc"
    parts = [event["logprobs"] for event in events if event["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in parts[0]} == choice["logprobs"]


def test_an_echo_is_the_beginning_of_the_text_or_all_of_it() -> None:
    items = [accepted(), delta("c"), end(1)]
    [choice] = told(items, stream=False)
    assert (choice["text"], choice["logprobs"]) == ("abc", None)
    assert [choice["text"] for choice in told(items, stream=True)] == ["ab", "c", ""]
    items = [accepted(prompt="駅"), end(0)]
    [choice] = told(items, stream=False, prompt=[7, 8], max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == ("駅", "length")
    assert [event["text"] for event in told(items, stream=True, prompt=[7, 8], max_tokens=0)] == ["駅", ""]


def test_an_answer_is_exactly_this() -> None:
    items = [accepted(), delta(" upon"), delta(' "a"', sequence=1)]
    items.append(finished(tokens=2, prompt=1, reason="length"))
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1700000000, "model": "org/m"}
    form = completions.CompletionChoiceRenderer(logprobs=False, choices=1)
    document = json.loads(answer.ChoiceDocumentRenderer(head.copy, form, choices=1).feed([(0, [*items])]))
    assert document == head | {
        "choices": [{"index": 0, "text": ' upon "a"', "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip
    stream = answer.ChoiceSseRenderer(head.copy, form, choices=1, include_usage=False)
    begin = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":[{{"index":0,"text":'
    end = '"logprobs":null,"finish_reason":'
    assert stream.feed([(0, [*items])]).decode() == (
        f': keep-alive\n\n{begin}" upon",{end}null}}]}}\n\n{begin}" \\"a\\"",{end}null}}]}}\n\n'
        f'{begin}"",{end}"length"}}]}}\n\ndata: [DONE]\n\n'
    )


def scored(first: int, pieces: Sequence[bytes]) -> PromptLogprobs:
    tokens = [
        PromptToken(bytes=piece, logprob=None if first + index == 0 else -1.0)
        for index, piece in enumerate(pieces)
    ]
    return PromptLogprobs(incarnation="w", id="x", first=first, tokens=tokens)


def offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Return the text offsets of all tokens, scored in one message."""
    echo = Echo(text, scored=True)
    echo.add_prompt(accepted(prompt_tokens=len(pieces)))
    echo.add_prompt(scored(0, pieces))
    prompt, lists = echo.take()
    assert prompt == text
    assert lists is not None
    return list(lists["text_offset"])


def test_what_the_tokenizer_adds_or_writes_otherwise_moves_no_offset() -> None:
    assert offsets("Once more", [b"<s>", b" Once", b" more"]) == [0, 0, 4]
    assert offsets(" Once", [b"<s>", b" Once"]) == [0, 0]
    assert offsets("e\u0301tude and", ["é".encode(), b"tude", b" and"]) == [0, 2, 6]


@settings(max_examples=40)
@given(st.text(min_size=1), st.data())
def test_joined_pieces_are_the_prompt_however_it_is_cut(text: str, data: Any) -> None:
    raw = text.encode(errors="replace")
    text = raw.decode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)), max_size=12)) | {len(raw)})
    pieces = [raw[first:last] for first, last in itertools.pairwise([0, *cuts])]
    echo = Echo(text, scored=True)
    echo.add_prompt(accepted(prompt_tokens=len(pieces)))
    said, places = "", []
    parts = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    for first, last in itertools.pairwise(parts):
        echo.add_prompt(scored(first, pieces[first:last]))
        more, lists = echo.take()
        said += more
        places += lists["text_offset"] if lists else []
    assert said == text
    assert len(places) == len(pieces)
    # A token's offset is that of the character which contains the token's first byte.
    begins = [len(raw[:at].decode(errors="ignore")) for at in [0, *cuts[:-1]]]
    assert places == begins
