"""Prompt logprobs are reported exactly once per token, whatever happens to the rows.

The scripted engine's logprob of a token is its negative id.
"""

from __future__ import annotations

import pytest

from protocol.messages import Finished, PrefixHit, PromptLogprobs
from protocol.types import PromptToken
from tests.worker.engines import END, Broken, House, ScriptedEngine, ScriptedPipeline
from worker.core import publisher
from worker.values import CacheSpec, SamplingParams

ASKS = SamplingParams(logprobs=1)
PLENTY = 10**9


def told(house: House, id: str) -> list[PromptToken]:
    """Return the reported prompt tokens, with a marker in place of every part that is out of order."""
    tokens: list[PromptToken] = []
    for part in (message for message in house.published if isinstance(message, PromptLogprobs)):
        if part.id == id:
            tokens += part.tokens if part.first == len(tokens) else [PromptToken(bytes=b"out of order")]
    return tokens


def expected(prompt: tuple[int, ...], top: int = 1) -> list[PromptToken]:
    spelled = [b"<%d>" % token for token in prompt]
    return [
        PromptToken(bytes=spelled[0]),
        *(
            PromptToken(bytes=text, logprob=-float(token), top=[(text, -float(token))] * top)
            for text, token in zip(spelled[1:], prompt[1:], strict=True)
        ),
    ]


def check_order(house: House, id: str) -> None:
    """Check that prompt logprobs follow the report of the reused prefix and precede the answer."""
    said = [m for m in house.published if getattr(m, "id", None) == id]
    kinds = [type(message) for message in said]
    assert kinds == sorted(kinds, key=[PrefixHit, PromptLogprobs, Finished].index)
    first = next((n for n, m in enumerate(house.published) if id in str(m) and hasattr(m, "deltas")), None)
    last = max(n for n, m in enumerate(house.published) if isinstance(m, PromptLogprobs) and m.id == id)
    assert first is None or last < first


@pytest.mark.parametrize("length", [1, 2, 40])
def test_each_token_of_a_prompt_is_told_once_before_the_answer(length: int) -> None:
    house = House()
    house.submit("a", 5, 6, prompt=length, sampling=ASKS, echo=True)
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    assert house.text("a") == "<5><6>"
    check_order(house, "a")


def test_without_logprobs_an_echo_asks_nothing_of_the_engine() -> None:
    house = House()
    house.submit("a", 5, echo=True)
    house.submit("b", 5, sampling=ASKS)
    house.run()
    assert house.engine.scored == {}
    assert told(house, "a") == told(house, "b") == []


def test_a_long_prompt_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PART_TOKENS_MAX", 10)
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=100, sampling=ASKS, echo=True)
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    assert max(len(m.tokens) for m in house.published if isinstance(m, PromptLogprobs)) == 10


@pytest.mark.parametrize("length", [1, 30])
def test_an_echo_alone_ends_without_a_token(length: int) -> None:
    house = House()
    house.submit("a", 5, prompt=length, sampling=ASKS, echo=True, max_tokens=0)
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    end = house.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens, end.usage.prompt_tokens) == ("length", 0, length)
    assert house.engine.calls.get("step", -1) == -1


def test_the_end_of_a_scored_answer_is_told_like_a_token() -> None:
    house = House()
    house.submit("scored", sampling=ASKS, echo=True)
    house.submit("plain", sampling=ASKS)
    house.run()
    assert [len(delta.likelihoods) for delta in house.deltas("scored")] == [1]
    assert [len(delta.likelihoods) for delta in house.deltas("plain")] == [0]
    assert house.tokens("scored") == [END]


def test_copies_of_a_prompt_are_told_what_one_finds_out() -> None:
    house = House()
    house.submit("a", 5, prompt=30, sampling=ASKS, echo=True)
    house.submit("b", 6, like="a", sampling=SamplingParams(logprobs=3), echo=True)
    house.submit("c", 7, like="a", sampling=SamplingParams(logprobs=0), echo=True, max_tokens=0)
    house.run()
    prompt = house.engine.prompts["a"]
    assert told(house, "a") == expected(prompt)
    assert told(house, "b") == expected(prompt, 3)
    assert told(house, "c") == expected(prompt, 0)
    assert sum(house.engine.sizes) == 29
    assert house.engine.forks == [("a", "b")]


def test_a_copy_that_asks_nothing_does_not_wait_for_numbers_nor_one_that_comes_late_miss_any() -> None:
    house = House(prefill_tokens=8)
    house.submit("a", 5, prompt=60, sampling=ASKS, echo=True)
    house.submit("plain", 6, like="a")
    house.engine.at["prefill", 1] = lambda: house.submit("late", 7, like="a", sampling=ASKS, echo=True)
    house.run()
    prompt = house.engine.prompts["a"]
    assert told(house, "a") == told(house, "late") == expected(prompt)
    assert house.text("plain") == "<6>"


@pytest.mark.parametrize("scored", [0, 1, 17, 30])
def test_a_resumed_row_tells_only_what_its_client_has_not(scored: int) -> None:
    house = House()
    house.submit("a", 5, prompt=30, sampling=ASKS, echo=True, scored=scored)
    house.run()
    parts = [m for m in house.published if isinstance(m, PromptLogprobs)]
    rest = [token for part in parts for token in part.tokens]
    assert rest == expected(house.engine.prompts["a"])[scored:]
    assert [part.first for part in parts][:1] == ([scored] if rest else [])
    assert len(house.engine.scored.get("a", [])) == (30 - max(scored, 1))


@pytest.mark.parametrize("shape", [CacheSpec(), CacheSpec(has_states=True), CacheSpec(window=31)], ids=str)
def test_a_stored_prefix_is_not_taken_by_a_row_that_asks_and_may_be_left_by_it(shape: CacheSpec) -> None:
    house = House(prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)
    house.submit("first", 5, prompt=600)
    house.run()
    house.submit("asks", 5, like="first", sampling=ASKS, echo=True)
    house.run()
    house.submit("after", 5, like="first")
    house.run()
    reused = {m.id: m.reuse for m in house.published if isinstance(m, PrefixHit)}
    assert (reused["asks"].tokens, reused["asks"].miss) == (0, "request")
    assert reused["after"].tokens == 599
    assert told(house, "asks") == expected(house.engine.prompts["first"])

    fresh = House(prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)
    fresh.submit("asks", 5, prompt=600, sampling=ASKS, echo=True)
    fresh.run()
    fresh.submit("after", 5, like="asks")
    fresh.run()
    assert {m.id: m.reuse.tokens for m in fresh.published if isinstance(m, PrefixHit)}["after"] == 599


def test_a_resumed_row_takes_what_is_stored_of_what_was_told() -> None:
    house = House(prefill_tokens=256, engine=ScriptedEngine(shape=CacheSpec()), store_bytes=PLENTY)
    house.submit("first", 5, prompt=600)
    house.run()
    house.submit("asks", 5, like="first", sampling=ASKS, echo=True, scored=400)
    house.run()
    reused = {m.id: m.reuse for m in house.published if isinstance(m, PrefixHit)}
    assert reused["asks"].tokens == 399
    parts = [m for m in house.published if isinstance(m, PromptLogprobs)]
    rest = [token for part in parts for token in part.tokens]
    assert rest == expected(house.engine.prompts["first"])[400:]


@pytest.mark.parametrize("broken", ["lead", "copy"])
def test_a_prompt_that_cannot_be_spelled_is_its_own_rows_failure(broken: str) -> None:
    class Mute(ScriptedPipeline):
        def spell(self, token: int) -> bytes:
            raise Broken("the vocabulary")

    house = House(prefill_tokens=64)
    house.pipelines[broken] = Mute
    house.submit("lead", 5, prompt=20, sampling=ASKS, echo=True)
    house.submit("copy", 6, like="lead", sampling=ASKS, echo=True)
    house.submit("other", 7, prompt=21)
    house.run()
    assert house.failed(broken)
    whole = "copy" if broken == "lead" else "lead"
    assert told(house, whole) == expected(house.engine.prompts["lead"])
    assert house.reason(whole) == house.reason("other") == "stop"
