"""The mixture: which families are drawn how often, and how training turns long and thinking come in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from recipes.pocket import copies, objects, pictures, recall, talk, tools
from recipes.pocket.dialogue import Dialogue
from recipes.pocket.fillers import Fillers

Phase = Literal["short", "mixed", "long", "grown"]
"""`short` is mostly copying, from which recall, tools and JSON grow; `long` adds what takes 1,000 tokens;
`grown` goes on from a finished model, with more calls of tools and more copies, for the tokens that are rare
elsewhere."""

MAKERS: dict[str, Callable[[Fillers], Dialogue]] = {
    "copies": copies.copies,
    "long_copy": copies.long_copy,
    "spelling": copies.spelling,
    "counting": copies.counting,
    "long_counting": copies.long_counting,
    "recall": recall.recall,
    # More to choose from than the held-out dialogues have.
    "tools": lambda fill: tools.tools(fill, counts=(1, 2, 2, 3, 3, 4)),
    # All of them asked for: more calls to learn from for the tokens that the schemas take.
    "many_tools": lambda fill: tools.tools(fill, counts=(3, 4, 4, 5, 5), questions=(5,)),
    "objects": objects.objects,
    "talk": talk.talk,
    "noise": talk.noise,
    "long_noise": lambda fill: talk.noise(fill, longest=120),
    "picture": pictures.picture,
    "pair": pictures.pair,
}
MIXTURES: dict[Phase, dict[str, float]] = {
    "short": {"copies": 40, "recall": 30, "objects": 10, "tools": 10, "talk": 5, "picture": 5},
    "mixed": {
        "copies": 24, "long_copy": 2, "spelling": 10, "counting": 6, "recall": 20, "tools": 40, "objects": 20,
        "talk": 10, "noise": 2, "picture": 40, "pair": 20,
    },
    "long": {
        "copies": 36, "long_copy": 6, "spelling": 20, "counting": 6, "long_counting": 4, "recall": 20,
        "tools": 30, "many_tools": 30, "objects": 20, "talk": 12, "noise": 2, "long_noise": 0.7,
        "picture": 40, "pair": 20,
    },
    "grown": {
        "copies": 60, "long_copy": 12, "spelling": 20, "counting": 6, "long_counting": 6, "recall": 32,
        "tools": 50, "many_tools": 64, "objects": 28, "talk": 14, "noise": 4, "long_noise": 2.5,
        "picture": 54, "pair": 44,
    },
}  # fmt: skip


def draw_dialogue(seed: str, phase: Phase, pieces: Sequence[str] = ()) -> Dialogue:
    """The dialogue of `seed`: the same on every machine."""
    fill = Fillers(random.Random(seed), pieces=pieces)
    mixture = MIXTURES[phase]
    family = fill.draw.choices(list(mixture), list(mixture.values()))[0]
    return with_thinking(MAKERS[family](fill), fill)


def with_thinking(dialogue: Dialogue, fill: Fillers) -> Dialogue:
    """Most are asked for plainly, as a client does that says nothing about thinking."""
    draw = fill.draw.random()
    dialogue.thinking = True if draw < 0.12 else False if draw < 0.25 else None
    return dialogue
