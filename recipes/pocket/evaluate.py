"""Share of held-out dialogues whose greedy answer is exactly right, by family.

Greedy decoding produces the expected answer, end of turn included, if and only if each of its tokens is the
most likely one after the tokens before it. So one forward pass over prompt and answer is enough, without
generating; a correct answer in other words counts as wrong.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from recipes.pocket import copies, objects, pictures, recall, talk, tools
from recipes.pocket.batches import Batch, vision_inputs
from recipes.pocket.dialogue import Dialogue, encode, prompt_text
from recipes.pocket.fillers import SCRIPTS, Fillers
from recipes.pocket.model import new_model
from recipes.pocket.train import hidden_states, load

Maker = Callable[[Fillers], Dialogue]


def _exchange(family: str, make: Callable[[Fillers], Any]) -> Maker:
    return lambda fill: copies._dialogue(family, [make(fill)])


def _copy(script: str) -> Maker:
    return _exchange("copy", lambda fill: copies.copy_exchange(fill, 12, script))


def _last(maker: Maker, wanted: Callable[[Dialogue], bool]) -> Maker:
    """Return a maker of dialogues of `maker` whose last turn is `wanted`."""

    def make(fill: Fillers) -> Dialogue:
        while True:
            dialogue = maker(fill)
            if wanted(dialogue):
                return dialogue

    return make


def _thinking(on: bool) -> Maker:
    def make(fill: Fillers) -> Dialogue:
        dialogue = fill.pick((recall.recall, copies.copies, tools.tools, objects.objects))(fill)
        dialogue.thinking = on
        return dialogue

    return make


def _asks(dialogue: Dialogue, word: str) -> bool:
    content = dialogue.messages[-2]["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return word in text.lower()


FAMILIES: dict[str, Maker] = {
    "recall": _last(
        recall.recall, lambda d: "not told" not in d.answer and "?" in str(d.messages[-2]["content"])
    ),
    "recall: nobody told": _last(recall.recall, lambda d: "not told" in d.answer),
    **{f"copy: {script}": _copy(script) for script in SCRIPTS},
    "copy: 30 to 60 words": copies.long_copy,
    "spell": _exchange("spell", copies.spell_exchange),
    "count: up to 30 numbers": _exchange("count", copies.count_exchange),
    "count: up to 240 numbers": copies.long_counting,
    "tools: call": _last(tools.tools, lambda d: bool(d.messages[-1].get("tool_calls"))),
    "tools: use a result": _last(tools.tools, lambda d: d.messages[-2]["role"] == "tool"),
    "tools: none fits": _last(tools.tools, lambda d: d.answer == tools.NO_TOOL),
    "thinking on": _thinking(True),
    "thinking off": _thinking(False),
    # The first question only: later answers could be copied from earlier ones.
    "picture: colour": _last(pictures.picture, lambda d: len(d.messages) == 2 and _asks(d, "colo")),
    "picture: shape": _last(
        pictures.picture, lambda d: len(d.messages) == 2 and _asks(d, "shape") and not _asks(d, "colo")
    ),
    "picture: two compared": pictures.pair,
    "json": objects.objects,
    "small talk": talk.talk,
    "long noise": lambda fill: talk.noise(fill, longest=120),
}


def evaluate(model: Any, tokenizer: Any, count: int, seed: int) -> dict[str, float]:
    """Return the share of exactly right last answers over `count` held-out dialogues of each family."""
    model.eval()
    return {name: _share(model, tokenizer, name, maker, count, seed) for name, maker in FAMILIES.items()}


def _share(model: Any, tokenizer: Any, name: str, maker: Maker, count: int, seed: int) -> float:
    right = 0
    for index in range(count):
        fill = Fillers(random.Random(f"held out {seed} {name} {index}"), held_out=True)
        right += is_right(model, tokenizer, maker(fill))
    return right / count


def is_right(model: Any, tokenizer: Any, dialogue: Dialogue) -> bool:
    ids, _ = encode(dialogue, tokenizer)
    prompt = tokenizer._tokenizer.encode(prompt_text(dialogue, tokenizer), add_special_tokens=False).ids
    pixels, grids = vision_inputs(dialogue.images) if dialogue.images else (None, None)
    row = torch.tensor([ids])
    with torch.no_grad():
        hidden = hidden_states(model, Batch(row, row, pixels, grids))[0, len(prompt) - 1 : -1]
        return bool((model.lm_head(hidden).argmax(-1) == row[0, len(prompt) :]).all())


def table(shares: dict[str, float]) -> str:
    rows = [f"| {name} | {share:.1%} |" for name, share in shares.items()]
    return "\n".join(["| held-out dialogues | exactly right |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dialogues", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = new_model(tokenizer.get_vocab(), options.seed)
    load(model, options.folder)
    print(table(evaluate(model, tokenizer, options.dialogues, options.seed)))


if __name__ == "__main__":
    main()
