"""Evaluation of answers by the comparison's lines."""

from __future__ import annotations

import pytest

from bench.client import Answer
from bench.reuse import Trace, Turn
from bench.versus import chats, deaths, overload, reuse, starts, throughput
from bench.versus.__main__ import LINES, planned
from bench.versus.tables import CHOICES
from bench.versus.throughput import MAX_TOKENS


def answer(*pieces: float, tokens: int = MAX_TOKENS, prompt: int = 126, text: str = "said") -> Answer:
    return Answer(sent_at=0.0, pieces=list(pieces), text=text, tokens=tokens, prompt_tokens=prompt)


def test_waiting_is_counted_in_milliseconds_and_cpu_by_thousand_tokens() -> None:
    answers = [answer(0.1, 0.2, 0.4, tokens=3), answer(0.3, 0.4, tokens=2)]
    found = throughput.values(answers, 50.0, cpu_s=0.05)
    expected = {"rate": 50.0, "first": 200, "token": 125, "gap99": 200, "cpu": 10}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    with pytest.raises(RuntimeError, match="without text"):
        throughput.values([answer(0.1), answer()], 1.0, 1.0)


def test_other_prompts_and_other_lengths_are_remarked() -> None:
    ours = [answer(1.0)]
    assert throughput.unlike(ours, [answer(1.0, prompt=127)]) is None
    assert "130 tokens" in (throughput.unlike(ours, [answer(1.0, prompt=130)]) or "")
    assert throughput.remark(ours) is None
    assert "7 to 7 tokens" in (throughput.remark([answer(1.0, tokens=7)]) or "")


def test_turns_count_that_were_asked_both_ways() -> None:
    turns = {number: Turn(100, 90, 90, first_text_s=number / 10) for number in (2, 3, 4)}
    assert reuse.turns_ms(Trace(turns, {2: 1.0, 4: 3.0})) == {"cold": 2000.0, "warm": pytest.approx(300.0)}


def test_of_an_overload_parts_are_of_all_that_was_asked() -> None:
    outcome = overload.Outcome(served=10, refused_s=[0.001] * 80, lost=5, late=5)
    found = overload.values(5.0, outcome, seconds=2.0)
    assert found == {"capacity": 5.0, "served": 1.0, "told": 80.0, "lost": 5.0, "refused": 1.0}
    assert "refused" not in overload.values(5.0, overload.Outcome(served=10), seconds=2.0)


def test_a_stream_that_is_short_of_tokens_is_lost_and_another_text_is_seen() -> None:
    calm = [answer(1.0, tokens=4) for _ in range(3)]
    killed = [
        answer(1.0, 2.0, 9.0, 9.5, tokens=4),
        answer(1.0, 2.0, tokens=0),
        answer(1.0, 2.0, 5.0, tokens=4, text="else"),
    ]
    found = deaths.values(calm, killed, at=2.5, back=6.5)
    assert found == {"lost": 1.0, "changed": 1.0, "back": 4000.0, "pause": 7000.0}
    assert "pause" not in deaths.values([answer(1.0)], [answer(1.0, tokens=0)], at=1.0, back=2.0)
    before = deaths.values([answer(1.0)], [answer(1.0, 8.0, 8.5)], at=8.1, back=9.0)
    assert before["pause"] == pytest.approx(500), "a pause before the kill is none"


def test_a_line_is_measured_on_those_of_its_models_that_are_asked_for() -> None:
    lines = [("gaps", "dense"), ("throughput", "dense"), ("throughput", "vision")]
    assert planned(["gaps", "throughput"], ["dense", "vision"]) == lines
    assert planned(["gateway"], ["dense"]) == [("gateway", "scripted")]


def test_readme_choices_are_measured_figures() -> None:
    measured = {
        **{(chats.LINE, at): chats.figures_at(at) for at in chats.CONCURRENCIES},
        **{(starts.LINE, at): starts.figures_at(at) for at in starts.CONCURRENCIES},
        (deaths.LINE, None): deaths.FIGURES,
    }
    for choice in CHOICES:
        assert choice.figure in {figure.key for figure in measured[choice.line, choice.at]}
        assert choice.model in LINES[choice.line][1]


def test_prompts_are_long_and_short_and_no_text_is_sent_twice() -> None:
    asked = [text for first in (0, 50, 1000) for text in chats.prompts(16, first)]
    assert len(set(asked)) == len(asked)
    words = sorted(len(text.split()) for text in asked[:16])
    assert words[0] < chats.WORDS_MIN + 10
    assert words[-1] > chats.WORDS_MAX
