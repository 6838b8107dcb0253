"""Evaluation of measured turns and crowds."""

from __future__ import annotations

import pytest

from bench.client import Answer
from bench.reuse import Spread, Trace, Turn, prefilled, shares, speedups


def turn(cached: int | None, first_text_s: float = 1.0) -> Turn:
    return Turn(prompt_tokens=200, seen_tokens=160, cached_tokens=cached, first_text_s=first_text_s)


def test_one_miss_in_one_round_is_seen_and_an_unknown_one_leaves_the_share_unsaid() -> None:
    traces = [Trace({2: turn(160), 3: turn(160)}, {}), Trace({2: turn(160), 3: turn(0)}, {})]
    assert shares(traces, lambda each: each.prompt_tokens) == Spread(least=0.0, median=0.8)
    assert shares(traces, lambda each: each.seen_tokens) == Spread(least=0.0, median=1.0)
    assert shares([Trace({2: turn(160), 3: turn(None)}, {})], lambda each: each.prompt_tokens) is None


def test_a_speedup_is_a_median_of_rounds_before_it_is_one_of_turns_that_were_asked_again() -> None:
    # One round of the second turn is slow: over all six ratios the median would not be 6, nor the minimum 4.
    quick, slow = turn(0, 1.0), turn(0, 10.0)
    rounds = [Trace({2: quick, 5: each, 8: quick}, {2: 4.0, 5: 6.0, 8: 8.0}) for each in (quick, slow, quick)]
    assert speedups(rounds) == Spread(least=4.0, median=6.0)
    assert speedups([Trace({2: turn(0), 3: turn(0, 0.001)}, {2: 3.0})]) == Spread(3.0, 3.0)


def test_prefill_is_counted_in_prompts_if_every_answer_says_it() -> None:
    def answers(*cached: int | None) -> list[Answer]:
        return [Answer(prompt_tokens=100, cached_tokens=each) for each in cached]

    assert prefilled(answers(0, 90, 90), 100) == pytest.approx(1.2)
    assert prefilled(answers(0, None), 100) is None
