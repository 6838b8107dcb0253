"""The pocket model's training dialogues: reproducible, and without the held-out data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from recipes.pocket import copies, objects, recall, tools
from recipes.pocket.dialogue import Dialogue
from recipes.pocket.fillers import HELD_OUT_NAMES, HELD_OUT_PLACES, Fillers
from recipes.pocket.synthesize import MAKERS, MIXTURES, draw_dialogue

TEXT_MAKERS = (recall.recall, copies.copies, tools.tools, objects.objects)


def fillers(seed: int, held_out: bool = False) -> Fillers:
    return Fillers(random.Random(seed), held_out)


def test_a_seed_names_one_dialogue() -> None:
    first, again = draw_dialogue("7", "long"), draw_dialogue("7", "long")
    assert (first.messages, first.tools, first.thinking) == (again.messages, again.tools, again.thinking)
    assert all(mixture.keys() <= MAKERS.keys() for mixture in MIXTURES.values())


def test_training_and_evaluation_share_no_invented_filler() -> None:
    trained = {fillers(seed).name() for seed in range(500)}
    held_out = {fillers(seed, held_out=True).name() for seed in range(500)}
    assert not trained & held_out


@pytest.mark.parametrize("maker", TEXT_MAKERS)
def test_training_never_shows_a_held_out_name_or_place(maker: Callable[[Fillers], Dialogue]) -> None:
    for seed in range(60):
        written = json.dumps(maker(fillers(seed)).messages, ensure_ascii=False).split()
        assert not {*HELD_OUT_NAMES, *HELD_OUT_PLACES} & {word.strip('".,!?') for word in written}
