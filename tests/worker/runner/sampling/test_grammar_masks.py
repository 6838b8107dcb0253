"""Grammar masks in the engine: tokens equal upstream's under the same masks, beside other rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import KVCache

from tests.worker.probed_networks import engine_of, network
from tests.worker.rules import RuleGrammar, Unforeseeing, processor
from tests.worker.runner.test_engine_parity import Job, Rewrapped, endless_tokenizer, play
from worker.runner.runner import BatchEngine
from worker.values import GuideError, SamplingParams, ThinkingBudget


def held_alone(name: str, job: Job, model: Any = None) -> list[int]:
    """Return the tokens of upstream's generator with a logits processor that applies the same masks."""
    assert job.sampling.grammar is not None
    answers = stream_generate(
        model or network(name),
        endless_tokenizer(name),
        list(job.prompt),
        max_tokens=job.tokens,
        prefill_step_size=512,
        logits_processors=[processor(job.sampling.grammar)],
    )
    return [answer.token for answer in answers][: job.tokens]


def resumed(name: str, job: Job, answered: Sequence[int], tokens: int) -> list[int]:
    """Return the next tokens of a row that resumes after `answered`."""
    engine = engine_of(name)
    whole = (*job.prompt, *answered)
    if whole[:-1]:
        engine.prefill({"row": whole[:-1]})
    engine.start("row", whole, len(job.prompt), job.sampling)
    return [engine.step().tokens.get("row", -1) for _ in range(tokens + 1)][1:]


def test_forced_tokens_override_the_grammar_and_are_passed_to_its_guide() -> None:
    grammar = RuleGrammar(3)
    cap = ThinkingBudget(5, opening=(1998,), closing=(1999, 10), is_open=True)
    sampling = SamplingParams(forced=(11, 12), thinking_budget=cap, grammar=grammar, seed=2, temperature=1.0)
    job = Job("row", (5, 6, 7), 30, sampling)
    beside = [Job(f"{n}", (8, n), 20, replace(sampling, thinking_budget=None, forced=())) for n in range(3)]
    said = play(engine_of("sliding"), [job, *beside], random.Random(2))["row"]
    assert said[:2] == [11, 12]
    assert said[5:7] == [1999, 10]
    guide = next(guide for _, guide in grammar.opened if guide.seen[:2] == [11, 12])
    assert guide.seen == said[: len(guide.seen)]
    assert len(guide.seen) >= len(said) - 1
    assert guide.asked <= len(said) + 1 - 4  # the guide is not queried where tokens are forced
    for cut in range(0, 9, 2):
        assert resumed("sliding", job, said[:cut], 12) == said[cut : cut + 12]


class Fault(Exception):
    pass


@dataclass
class Failing(Unforeseeing):
    """A grammar and its guide that works for `tokens` tokens and then fails as `fails` says."""

    tokens: int
    fails: str
    seen: int = 0

    def open(self, answered: Sequence[int]) -> Failing:
        return self

    def accept_token(self, token: int) -> None:
        self.seen += 1
        if self.fails == "saw" and self.seen == self.tokens:
            raise Fault

    def fill(self, mask: memoryview) -> bool:
        if self.seen < self.tokens:
            return False
        if self.fails == "fill":
            raise Fault
        if self.fails == "beyond":
            mask[1] = 0xFFFFFFFE  # the last of 33 logits is the first bit of its word
        return True


@pytest.mark.parametrize(("fails", "tokens"), [("saw", 4), ("fill", 0), ("empty", 1), ("beyond", 0)])
def test_a_guide_that_fails_fails_its_row_behind_the_tokens_it_let_pass(fails: str, tokens: int) -> None:
    prompt = (5, 6, 7)
    engine = BatchEngine(Narrow())
    for name, grammar in (("well", None), ("ill", Failing(tokens, fails))):
        engine.prefill({name: prompt[:-1]})
        engine.start(name, prompt, 3, SamplingParams(grammar=grammar))
    steps = [engine.step() for _ in range(tokens + 3)][1:]
    expected = [step.tokens["well"] for step in steps]
    assert [step.tokens.get("ill") for step in steps[:tokens]] == expected[:tokens]
    for step in steps[tokens:]:
        assert step.tokens.keys() == {"well"}
        assert isinstance(step.failed["ill"], GuideError if fails in ("empty", "beyond") else Fault)
    assert not any(step.failed for step in steps[:tokens])
    engine.drop("ill")
    after = engine.step()
    assert after.tokens.keys() == {"well"}
    assert not after.failed


class Narrow(Rewrapped):
    """The dense model with 33 logits."""

    def __init__(self) -> None:
        super().__init__(KVCache)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return super().__call__(tokens, cache)[..., :33]
