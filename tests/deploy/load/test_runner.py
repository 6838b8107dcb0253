"""Load runner with an endpoint played by the test, and the summary of its samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.load import figures, runner
from deploy.load.client import Target, TargetError
from deploy.load.report import document, ratios, table
from deploy.load.runner import Load, PromptShape, Scale, prompt
from deploy.load.samples import Sample, summarize

TARGET = Target("http://played", "m")
SHAPE = PromptShape(40, 10)

scales = st.builds(Scale, fixed=st.floats(0, 30), per_word=st.floats(0.5, 4))


class Endpoint:
    """Endpoint that answers with `max_tokens` words. `most` is the highest number of concurrent requests."""

    def __init__(self) -> None:
        self.under_way = self.most = 0
        self.asked: list[str] = []
        self.status = 200

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        self.asked.append(" ".join(message["content"] for message in body["messages"]))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "no", "code": "busy"}})
        words = len(self.asked[-1].split())
        usage = {"prompt_tokens": 8 + 2 * words, "completion_tokens": body["max_tokens"]}
        events = [{"choices": [{"delta": {"content": "w "}}]}] * body["max_tokens"]
        lines = [f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}]]
        return httpx.Response(200, content="".join([*lines, "data: [DONE]\n\n"]).encode())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    played = Endpoint()

    @asynccontextmanager
    async def connected(target: Target) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=target.url, transport=httpx.MockTransport(played)) as http:
            yield http

    monkeypatch.setattr(runner, "connected", connected)
    return played


def test_refusal_is_an_error_of_its_request_and_of_a_target_without_answers(endpoint: Endpoint) -> None:
    endpoint.status = 503
    samples = asyncio.run(runner.run(TARGET, Load(2, SHAPE, 1, concurrency=1), Scale(), "seed"))
    assert [sample.error for sample in samples] == ["503 busy"] * 2
    with pytest.raises(TargetError, match="failed for model m: 503 busy"):
        asyncio.run(runner.scale_of(TARGET))


def test_sides_take_turns_and_share_no_prompt(endpoint: Endpoint) -> None:
    told: list[str] = []
    sides = {"a": TARGET, "b": TARGET}
    loads = [Load(2, SHAPE, 2, concurrency=2), Load(2, SHAPE, 2, rate=1000.0)]
    results = asyncio.run(runner.measure(sides, loads, 2, "seed", told.append))
    assert [line.rsplit(" ", 1)[1] for line in told] == ["a", "b", "b", "a"] * 2
    measured = endpoint.asked[4:]
    assert len(set(measured)) == len(measured) == 16
    assert table(results).row_count == 4
    assert len(ratios(results)) == 2
    written = json.loads(json.dumps(document(results, {"seed": "seed"})))
    assert [load["rate"] for load in written["loads"]] == [None, 1000.0]
    [first, _] = written["loads"][0]["sides"]["a"]
    assert (first["requests"], first["errors"], first["tokens"], first["gap_s"]["count"]) == (2, {}, 4, 2)


def _words(shape: PromptShape, scale: Scale, seed: str, number: int = 0) -> list[str]:
    return " ".join(message["content"] for message in prompt(shape, scale, seed, number)).split()


@settings(max_examples=30)
@given(scales, st.integers(2, 400), st.integers(0, 500))
def test_prompts_share_as_much_as_they_shall_and_then_differ(scale: Scale, length: int, shared: int) -> None:
    one, other = (_words(PromptShape(length, shared), scale, "run", number) for number in (0, 1))
    assert len(one) == len(other) == scale.words(length)
    alike = min(scale.words(length) - 1, round(shared / scale.per_word)) if shared else 0
    assert one[:alike] == other[:alike]
    if len(one) - alike > 20:
        assert one[alike:] != other[alike:]
    if len(one) > 20:
        assert _words(PromptShape(length, shared), scale, "another run") != one


def answered(sent_at: float, *pieces: float, tokens: int = 0) -> Sample:
    return Sample(sent_at, list(pieces), pieces[-1] + 0.5, tokens=tokens, prompt_tokens=10, cached_tokens=4)


def test_times_are_those_of_what_was_answered_and_errors_are_counted() -> None:
    told = summarize(
        [
            answered(0.0, 1.0, 1.5, 2.5),
            answered(1.0, 3.0, 3.25, tokens=5),
            Sample(0.5, [0.75], 9.5, error="503 text_generation_busy"),
            Sample(0.5, [], 1.0),
        ]
    )
    assert (told.requests, told.seconds) == (4, 9.5)
    assert told.errors == {"503 text_generation_busy": 1, "empty answer": 1}
    assert (told.tokens, told.prompt_tokens, told.cached_tokens) == (3 + 5, 20, 8)
    assert told.tokens_per_s == pytest.approx(8 / 9.5)
    assert told.requests_per_s == pytest.approx(2 / 9.5)
    assert (told.first_s.at[50], told.first_s.at[99], told.first_s.mean) == (1.0, 2.0, 1.5)
    assert (told.gap_s.count, told.gap_s.at[90]) == (3, 1.0)
    assert told.per_token_s.at[50] == pytest.approx(0.25 / 4)


def test_a_stream_is_read_as_servers_write_it() -> None:
    sample = Sample(0.0)
    sample.note({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0.5)
    sample.note({"choices": [{"delta": {"content": "a"}}]}, 1.0)
    sample.note({"choices": [{"delta": {"reasoning_content": "b", "reasoning": "b"}}]}, 2.0)
    sample.note({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}], "usage": None}, 3.0)
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
    sample.note({"choices": [], "usage": usage}, 4.0)
    assert sample.pieces == [1.0, 2.0, 3.0]
    assert (sample.prompt_tokens, sample.tokens, sample.cached_tokens) == (7, 9, 5)
    sample.note({"error": {"message": "gone"}}, 5.0)
    assert sample.error


def test_shared_figures_are_those_of_their_loads(endpoint: Endpoint) -> None:
    results = asyncio.run(runner.measure({"": TARGET}, figures.LOADS, 2, "seed", lambda told: None))
    assert figures.errors(results) == []
    found = figures.figures(results)
    assert len(found) == 5
    assert all(each["smallest"] <= each["median"] <= each["largest"] for each in found)
    prompts = endpoint.asked[2:]
    lengths = [len(text.split()) for text in prompts]
    assert lengths == [60] * 2 * (4 + 16) + [1020] * 2 * (2 + 5)
    long, again = prompts[40:42], prompts[44:49]
    assert len({text[:500] for text in [*long, *again]}) == 3, "only the last load shares a prefix"
    endpoint.status = 503
    results = [
        (load, {"": [summarize(asyncio.run(runner.run(TARGET, load, Scale(), "s")))]})
        for load in figures.LOADS
    ]
    assert figures.errors(results) == ["503 busy"]
