"""Evaluation of answers by the comparison's lines."""

from __future__ import annotations

import pytest

from bench.client import Answer
from bench.versus import chats, deaths, starts
from bench.versus.__main__ import LINES
from bench.versus.tables import CHOICES
from bench.versus.throughput import MAX_TOKENS


def answer(*pieces: float, tokens: int = MAX_TOKENS, prompt: int = 126, text: str = "said") -> Answer:
    return Answer(sent_at=0.0, pieces=list(pieces), text=text, tokens=tokens, prompt_tokens=prompt)


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


def test_readme_choices_are_measured_figures() -> None:
    measured = {
        **{(chats.LINE, at): chats.figures_at(at) for at in chats.CONCURRENCIES},
        **{(starts.LINE, at): starts.figures_at(at) for at in starts.CONCURRENCIES},
        (deaths.LINE, None): deaths.FIGURES,
    }
    for choice in CHOICES:
        assert choice.figure in {figure.key for figure in measured[choice.line, choice.at]}
        assert choice.model in LINES[choice.line][1]
