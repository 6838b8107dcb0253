"""The generating test models are varied enough to reveal an error, and vision models see their images."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.configs import CONFIGS
from tests.models.fixtures import model_folder
from tests.models.vision_models import EYES
from tests.models.zoo import ZOO
from tests.models.zoo_parts import WINDOW
from tests.worker.image_questions import answer, draw_question


@pytest.mark.parametrize("name", [*CONFIGS, *ZOO])
def test_it_loads_and_is_lively(name: str) -> None:
    model, _ = load_model(model_folder(name))
    rng = random.Random(0)
    prompt = [rng.randrange(2000) for _ in range(2 * WINDOW)]
    answer = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=24)]
    assert len(set(answer)) > 10, "the output repeats itself"

    prompts = [prompt, [prompt[0] + 1, *prompt[1:]]]
    logits, other = (model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1] for tokens in prompts)
    assert 2.0 < float(mx.std(logits)) < 8.0
    assert float(mx.abs(logits - other).max()) > 0.1, "the logits do not depend on the prompt's first tokens"


@pytest.mark.parametrize("name", EYES)
def test_images_in_another_order_have_another_answer(name: str) -> None:
    three = draw_question(random.Random(7), 3)
    swapped = replace(three, images=three.images[::-1])
    assert answer(name, three, 8) != answer(name, swapped, 8)
