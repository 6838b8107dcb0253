"""Prompt logprobs are reported exactly once per token, whatever happens to the rows.

The scripted engine's logprob of a token is its negative id.
"""

from __future__ import annotations

import random

import pytest

from protocol.messages import Finished, PrefixHit, PromptLogprobs
from protocol.types import PromptToken
from tests.worker.engines import END, Broken, House, ScriptedEngine, ScriptedPipeline, breaking
from worker.contract.engine import CacheSpec, SamplingParams
from worker.schedule import prompt_logprobs

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


@pytest.mark.parametrize("length", [1, 2, 9, 40])
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
    monkeypatch.setattr(prompt_logprobs, "PART_TOKENS_MAX", 10)
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=100, sampling=ASKS, echo=True)
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    assert max(len(m.tokens) for m in house.published if isinstance(m, PromptLogprobs)) == 10


@pytest.mark.parametrize("length", [1, 5, 30])
def test_an_echo_alone_ends_without_a_token(length: int) -> None:
    house = House()
    house.submit("a", 5, prompt=length, sampling=ASKS, echo=True, max_tokens=0)
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    end = house.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens, end.usage.prompt_tokens) == ("length", 0, length)
    assert house.engine.calls.get("step", -1) == -1


def test_an_echo_that_needs_nothing_computed_ends_at_once() -> None:
    house = House()
    house.submit("a", 5, prompt=30, echo=True, max_tokens=0)
    house.run()
    assert house.reason("a") == "length"
    assert house.engine.groups == []


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


@pytest.mark.parametrize("scored", [0, 1, 2, 17, 29, 30])
def test_a_resumed_row_tells_only_what_its_client_has_not(scored: int) -> None:
    house = House()
    house.submit("a", 5, prompt=30, sampling=ASKS, echo=True, scored=scored)
    house.run()
    parts = [m for m in house.published if isinstance(m, PromptLogprobs)]
    rest = [token for part in parts for token in part.tokens]
    assert rest == expected(house.engine.prompts["a"])[scored:]
    assert [part.first for part in parts][:1] == ([scored] if rest else [])
    assert len(house.engine.scored.get("a", [])) == (30 - max(scored, 1))


def test_a_row_that_goes_on_with_an_answer_tells_nothing_of_it_as_its_prompt() -> None:
    house = House()
    house.submit("a", 5, 6, 7, prompt=3, sampling=ASKS, echo=True, resume=(5, 6))
    house.run()
    assert told(house, "a") == expected(house.engine.prompts["a"])
    assert house.text("a") == "<7>"


class Swelling(ScriptedEngine):
    """An engine whose caches sometimes far exceed their reservation, so that a row must be preempted at any
    point."""

    rng = random.Random(5)

    def cache_bytes(self) -> int:
        swells = len(self.prefilled) + len(self.decoding) > 1 and self.rng.random() < 0.2
        return super().cache_bytes() + (10**6 if swells else 0)


def test_rows_that_are_preempted_tell_each_token_once() -> None:
    rng = random.Random(6)
    run_again = 0
    for _ in range(12):
        house = House(bytes_max=4096, prefill_tokens=16, engine=Swelling())
        asking = {f"row {n}": rng.random() < 0.7 for n in range(5)}
        for name, asks in asking.items():
            script = [rng.randint(5, 99) for _ in range(rng.randint(1, 60))]
            length = rng.choice([1, 2, rng.randint(30, 90)])
            house.submit(name, *script, prompt=length, sampling=ASKS if asks else SamplingParams(), echo=asks)
        house.run()
        run_again += sum(house.engine.sizes) > sum(len(p) - 1 for p in house.engine.prompts.values())
        for name, asks in asking.items():
            prompt, answer = house.engine.prompts[name], house.engine.scripts[name]
            assert told(house, name) == (expected(prompt) if asks else [])
            assert len(house.engine.scored.get(name, [])) == (len(prompt) - 1 if asks else 0)
            assert house.text(name) == "".join(f"<{token}>" for token in answer)
    assert run_again > 8


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
    assert (reused["asks"].tokens, reused["asks"].miss) == (0, "scored")
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


def test_a_prefill_that_fails_takes_what_was_told_with_it_and_nobody_elses() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=20, sampling=ASKS, echo=True)
    house.submit("b", 6, prompt=21, sampling=ASKS, echo=True)
    house.engine.at["prefill", 0] = breaking("both")
    house.engine.at["prefill", 1] = breaking("a alone")
    house.run()
    assert house.failed("a")
    assert told(house, "a") == []
    assert told(house, "b") == expected(house.engine.prompts["b"])


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
