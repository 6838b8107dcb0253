"""Prompts with facts: each is at its stated position, and the model made for them knows all of them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from bench.facts import END, FACT_TOKENS, LEAD, TELL, FactPrompt
from bench.recall_model import LARGE, SMALL, Shape, make_recaller


@given(st.integers(0, 50), st.integers(2, 20), st.integers(0, 200))
def test_an_answer_is_what_stands_at_its_places(seed: int, facts: int, filler: int) -> None:
    prompt = FactPrompt(FACT_TOKENS * facts + filler, facts, seed)
    assert len(prompt.tokens) == FACT_TOKENS * facts + filler
    assert len(set(prompt.places)) == facts
    for leading in (False, True):
        for question in prompt.questions(facts, leading=leading):
            told = [prompt.tokens[place : place + FACT_TOKENS] for place in question.places]
            assert told[0][:2] == question.tokens
            assert all(fact[0] == TELL and fact[-1] == END for fact in told)
            assert [token for fact in told for token in fact[2:-1]] == question.answer
            assert (LEAD in question.answer) == leading == (len(told) == 2)


@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_the_model_that_is_made_recalls_what_was_told(tmp_path: Path, shape: Shape) -> None:
    model = load_model(make_recaller(tmp_path, shape, 3))[0]
    prompt = FactPrompt(400, 16, 2)
    questions = [*prompt.questions(3, leading=False), *prompt.questions(3, leading=True)]
    asked = [token for question in questions for token in (*question.tokens, *question.answer, END)]
    said = mx.argmax(model(mx.array([prompt.tokens + asked]))[0], axis=-1).tolist()
    end = len(prompt.tokens)
    for question in questions:
        end += len(question.tokens) + len(question.answer) + 1
        answer = [*question.answer, END]
        assert said[end - len(answer) - 1 : end - 1] == answer
