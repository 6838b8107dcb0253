"""Questions with known answers: by the script, or by the embedded model, which was asked before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from broker.dialects.parameters import derived_seed
from tests.faults.streams import Client, scripted
from tests.system import chat_body

TOKENS_MAX = 150
TEXTS = ("Count from 1 to 60.", "Repeat: the quick brown fox.", "My name is Ida. What is my name?", "Hi")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "The tide in a harbour",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Question:
    """A request, its answers, what is thought before each, and how many tokens all that takes."""

    body: dict[str, object]
    thoughts: list[str]
    texts: list[str]
    tokens: int


Source = Callable[[random.Random], Question]


def of_the_scripted(dice: random.Random) -> Question:
    """What the scripted engine answers is known beforehand."""
    tokens, choices = dice.randint(1, TOKENS_MAX), dice.choice([1, 1, 1, 2])
    thinks = dice.choice([0, 0, dice.randint(1, TOKENS_MAX)])
    text = " ".join(["word"] * dice.randint(1, 9) + [f"!tokens={tokens}", f"!think={thinks}"])
    fields: dict[str, object] = {"n": choices, **_form(dice), **_company(dice)}
    if seeded := dice.random() < 0.5:
        fields |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
    seed = int(str(fields.get("seed", 0)))
    seeds = [seed, *(derived_seed(seed, choice) for choice in range(1, choices))]
    said = [scripted(text, tokens, each if seeded else 0).split() for each in seeds]
    thoughts, texts = [_spoken(words[:thinks]) for words in said], [_spoken(words[thinks:]) for words in said]
    return Question(chat_body(text, **fields), thoughts, texts, choices * (tokens + 1))


def _spoken(words: list[str]) -> str:
    return "".join(f"{word} " for word in words)


def of_the_embedded(url: str, seed: int, count: int) -> Source:
    """So many questions that are asked one by one now, while nobody disturbs the answers."""
    known = [_answered(url, body) for body in _drawn(random.Random(seed), count)]

    def draw(dice: random.Random) -> Question:
        question = dice.choice(known)
        plain = {name: it for name, it in question.body.items() if not name.startswith("stream")}
        return Question({**plain, **_form(dice)}, question.thoughts, question.texts, question.tokens)

    return draw


def _drawn(dice: random.Random, count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        fields: dict[str, object] = {"n": dice.choice([1, 1, 2]), **_company(dice)}
        fields |= {"max_tokens": dice.randint(20, TOKENS_MAX), "ignore_eos": dice.random() < 0.7}
        if number % 2:
            fields |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
        yield chat_body(dice.choice(TEXTS), **fields)


def _answered(url: str, body: dict[str, object]) -> Question:
    client = Client(url, body)
    client.run()
    return Question(body, client.thoughts, client.texts, client.completion_tokens)


def _form(dice: random.Random) -> dict[str, object]:
    """Streamed, or whole."""
    return {"stream": True, "stream_options": {"include_usage": True}} if dice.random() < 0.5 else {}


def _company(dice: random.Random) -> dict[str, object]:
    """With a tool in the prompt, or with thinking, for as long as it takes or not, or with neither."""
    thinking: dict[str, object] = {"enable_thinking": True}
    limited = thinking | {"thinking_budget": dice.randint(1, 12)}
    return dice.choice([{}, {"tools": [TOOL]}, thinking, limited])
