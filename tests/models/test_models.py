"""Behaviour of the test models under upstream's own loaders and generator."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from tests.models import make
from tests.models.fixtures import model_folder

PROMPTS = ("Hello!", "What is the capital of France?", "今天天气很好。", "def main():\n    return 1\n")


@pytest.fixture(scope="module", params=make.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> tuple[Any, Any]:
    folder = model_folder(name)
    model, config = load_model(folder)
    return model, load_tokenizer(folder, eos_token_ids=config["eos_token_id"])


def chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def last_logits(model: Any, tokens: list[int]) -> Any:
    return model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]


def test_greedy_text_is_varied_does_not_stop_and_stands_clear_of_rounding(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    gaps, first = list[float](), set[int]()
    for prompt in PROMPTS:
        logits = last_logits(model, chat(tokenizer, prompt))
        ordered = mx.sort(logits)
        gaps.append(float(ordered[-1] - ordered[-2]))
        answer = list(stream_generate(model, tokenizer, chat(tokenizer, prompt), max_tokens=64))
        tokens = [step.token for step in answer]
        assert len(tokens) == 64
        assert answer[-1].finish_reason == "length"
        assert len(set(tokens)) > 32
        assert len(set(tokens[-16:])) > 8, "the output ends in a loop"
        first.add(tokens[0])
    assert len(first) == len(PROMPTS)
    assert min(gaps) > 1e-3
    assert sorted(gaps)[len(gaps) // 2] > 0.2
