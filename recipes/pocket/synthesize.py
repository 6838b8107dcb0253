"""The training mixture: sampling weights of the dialogue families, by phase, and the share with reasoning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from recipes.pocket import copies, objects, pictures, recall, talk, tools
from recipes.pocket.dialogue import Dialogue
from recipes.pocket.fillers import Fillers

Phase = Literal["short", "mixed", "long", "grown"]
"""`short` is mostly copying, from which recall, tools and JSON develop. `long` adds dialogues of 1,000
tokens. `grown` continues from a finished model, with more tool calls and more copies, for tokens that are
rare elsewhere."""

MAKERS: dict[str, Callable[[Fillers], Dialogue]] = {
    "copies": copies.copies,
    "long_copy": copies.long_copy,
    "spelling": copies.spelling,
    "counting": copies.counting,
    "long_counting": copies.long_counting,
    "recall": recall.recall,
    # More tools than in the held-out dialogues.
    "tools": lambda fill: tools.tools(fill, counts=(1, 2, 2, 3, 3, 4)),
    # All tools are asked for, which gives more calls per token of schemas.
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
    """Return the dialogue of `seed`, the same on every machine."""
    fill = Fillers(random.Random(seed), pieces=pieces)
    mixture = MIXTURES[phase]
    family = fill.draw.choices(list(mixture), list(mixture.values()))[0]
    return with_thinking(MAKERS[family](fill), fill)


def with_thinking(dialogue: Dialogue, fill: Fillers) -> Dialogue:
    """Set reasoning on or off in some dialogues; most leave it unset, as most clients do."""
    draw = fill.draw.random()
    dialogue.thinking = True if draw < 0.12 else False if draw < 0.25 else None
    return dialogue
