"""The tiny vision models load in upstream, and their output depends on their images."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.models.vision_models import EYES
from tests.worker.image_questions import answer, draw_question

_TOKENS = 8


@pytest.mark.parametrize("name", EYES)
def test_other_images_have_other_answers(name: str) -> None:
    rng = random.Random(7)
    blind, one, three = (draw_question(rng, images) for images in (0, 1, 3))
    assert len(answer(name, blind, _TOKENS)) == _TOKENS
    assert answer(name, one, _TOKENS) != answer(name, replace(one, images=three.images[:1]), _TOKENS)
    swapped = replace(three, images=three.images[::-1])
    assert answer(name, three, _TOKENS) != answer(name, swapped, _TOKENS)
