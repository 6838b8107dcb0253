"""Token importance is attention: upstream's, and that on facts on which the answer depends."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import lfm2
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.facts import FACT_TOKENS, FactPrompt, Question
from tests.models.recaller import make_recaller
from worker.runner.token_importance import attended_by, score_tokens

TOKENS = 300


@cache
def network(dtype: mx.Dtype = mx.float32) -> Any:
    with TemporaryDirectory() as folder:
        model = load_model(make_recaller(Path(folder), 0))[0]
    model.set_dtype(dtype)
    return model


def read(model: Any, prompt: FactPrompt, question: Question) -> Any:
    """Return the caches of all but the last token."""
    rows = make_prompt_cache(model)
    model(mx.array([[*prompt.tokens, *question.tokens[:-1]]]), cache=rows)
    return rows


def test_probed_attention_equals_upstream_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with a network whose heads do not share values."""
    prompt = FactPrompt(TOKENS, 8, 0)
    [question] = prompt.questions(1, leading=False)
    rows = read(network(), prompt, question)
    seen: list[mx.array] = []
    usual = lfm2.scaled_dot_product_attention

    def watched(queries: mx.array, keys: mx.array, *others: Any, scale: float, **more: Any) -> mx.array:
        seen.append(mx.softmax(queries @ keys.swapaxes(-1, -2) * scale, axis=-1)[0, :, 0, :-1])
        out: mx.array = usual(queries, keys, *others, scale=scale, **more)
        return out

    monkeypatch.setattr(lfm2, "scaled_dot_product_attention", watched)
    _, heads = attended_by(network(), rows, mx.array([question.tokens[-1:]]), len(prompt.tokens) + 1)
    attention = mx.concatenate(seen)
    attention /= attention.sum(axis=-1, keepdims=True)
    heard = heads / heads.sum(axis=-1, keepdims=True)
    assert heard.shape == (4, TOKENS + 1)
    assert mx.abs(heard - attention).max().item() < 1e-4  # type: ignore[operator]


@pytest.mark.parametrize(
    ("leading", "dtype"), [(False, mx.float32), pytest.param(True, mx.bfloat16, marks=pytest.mark.bfloat16)]
)
def test_facts_that_the_answer_is_in_weigh_most(leading: bool, dtype: mx.Dtype) -> None:
    """Covers facts whose attention and answer are certain, and facts that matter only after others."""
    prompt = FactPrompt(TOKENS, 8, 1)
    for question in prompt.questions(2, leading=leading):
        weights = score_tokens(network(dtype), read(network(dtype), prompt, question), question.tokens[-1])
        facts = [weights[place : place + FACT_TOKENS].sum().item() for place in prompt.places]
        heaviest = sorted(prompt.places, key=lambda place: -facts[prompt.places.index(place)])
        assert set(heaviest[: len(question.places)]) == set(question.places)
