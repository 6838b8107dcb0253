"""Sets of long prompts that share prefixes, with the reference answer of each request.

Each set has prompts that share only the system prompt, prompts that also share about two thirds of their
length with others, conversations of three turns, and prompts that share nothing. No length is a multiple of
the prefix cache's block size, other than by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.corpus import make_corpus
from tests.oracle import Oracle

PIECE_TOKENS_MIN = 4
"""Minimum tokens of a piece of the corpus, which determines the number of pieces."""
CHAT_SHARE, GREEDY_SHARE = 0.7, 0.6
LONG_SHARE = 2 / 3
"""Fraction of the longest prompt that prompts with more than the system prompt in common share."""
ANSWER_TOKENS_MIN = 16
TEMPLATE_TOKENS = 40
"""Maximum tokens that a chat template adds to the texts of a prompt."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the prompts, of the shared system prompt and of the answers; requests in a set."""

    prompt_min: int = 600
    prompt_max: int = 3000
    shared: int = 900
    answer_max: int = 150
    requests: int = 24


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """A request body for `path`, with the text and the length of its reference answer."""

    path: str
    body: dict[str, Any]
    text: str
    tokens: int


class PromptTexts:
    """Texts of a given number of tokens, by the tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # a large library that nothing else here needs

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def draw(self, tokens: int, seed: int) -> str:
        """Return a text of `tokens` tokens that shares no prefix with texts of other seeds."""
        text = f"{seed}: " + "".join(make_corpus(20 + tokens // PIECE_TOKENS_MIN, seed))
        return self.cut(text, tokens)

    def cut(self, text: str, tokens: int) -> str:
        """Return the first `tokens` tokens of `text`."""
        offsets = self._offsets(text)
        return text if tokens >= len(offsets) else text[: offsets[tokens][0]]

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(self._offsets(text))

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return offsets


def draw_bodies(texts: PromptTexts, sizes: Sizes, dice: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of each request of a new set."""
    shared = texts.draw(sizes.shared, dice.randrange(2**40))
    longest = sizes.prompt_max - sizes.shared - TEMPLATE_TOKENS
    long = texts.draw(longest, dice.randrange(2**40))
    kinds = [_system_shared, _two_thirds_shared, _two_thirds_shared, _conversation, _nothing_shared]
    drawn = []
    for number in range(sizes.requests):
        messages = kinds[number % len(kinds)](texts, sizes, dice, shared, long)
        drawn.append(_with_parameters(messages, sizes, dice))
    return drawn


Messages = list[dict[str, str]]


def _length(sizes: Sizes, dice: random.Random) -> int:
    """Draw the number of tokens after the shared system prompt."""
    least = max(16, sizes.prompt_min - sizes.shared)
    return dice.randint(least, max(least, sizes.prompt_max - sizes.shared - TEMPLATE_TOKENS))


def _chat(system: str, *turns: str) -> Messages:
    roles = ("user", "assistant")
    spoken = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *spoken]


def _system_shared(texts: PromptTexts, sizes: Sizes, dice: random.Random, shared: str, long: str) -> Messages:
    return _chat(shared, texts.draw(_length(sizes, dice), dice.randrange(2**40)))


def _two_thirds_shared(
    texts: PromptTexts, sizes: Sizes, dice: random.Random, shared: str, long: str
) -> Messages:
    length = _length(sizes, dice)
    begun = texts.cut(long, int(length * LONG_SHARE) - dice.randrange(16))
    return _chat(shared, begun + texts.draw(length - int(length * LONG_SHARE), dice.randrange(2**40)))


def _conversation(texts: PromptTexts, sizes: Sizes, dice: random.Random, shared: str, long: str) -> Messages:
    length = _length(sizes, dice)
    answer = texts.draw(length // 4, dice.randrange(2**40))
    return _chat(shared, texts.cut(long, length // 2), answer, texts.cut(answer, 5 + dice.randrange(20)))


def _nothing_shared(
    texts: PromptTexts, sizes: Sizes, dice: random.Random, shared: str, long: str
) -> Messages:
    length = dice.randint(sizes.prompt_min, sizes.prompt_max - TEMPLATE_TOKENS)
    text = texts.draw(length, dice.randrange(2**40))
    return _chat(texts.cut(text, 20), text)


def _with_parameters(messages: Messages, sizes: Sizes, dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Return path and body of a chat or of a completion of the same texts, greedy or seeded."""
    parameters: dict[str, Any] = {
        "max_tokens": dice.randint(ANSWER_TOKENS_MIN, sizes.answer_max),
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if dice.random() >= GREEDY_SHARE:
        parameters |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
    if dice.random() < CHAT_SHARE:
        return "/v1/chat/completions", {"messages": messages, **parameters}
    prompt = "\n\n".join(message["content"] for message in messages)
    return "/v1/completions", {"prompt": prompt, **parameters}


Ask = Callable[[str, dict[str, Any]], str]
"""A function from path and body to the text of an undisturbed answer of the server."""


def with_references(
    folder: Path,
    oracle: Oracle,
    drawn: Sequence[tuple[str, dict[str, Any]]],
    ask: Ask,
) -> list[ReferenceRequest]:
    """Add reference answers to requests: upstream's for greedy ones, those of `ask` for seeded ones."""
    greedy = [body for _, body in drawn if not body["temperature"]]
    oracle.ask(folder, [_for_oracle(body) for body in greedy])
    seeded = {id(body): ask(path, body) for path, body in drawn if body["temperature"]}
    texts = seeded | {id(body): answer["text"] for body, answer in zip(greedy, oracle.hear(), strict=True)}
    return [ReferenceRequest(path, body, texts[id(body)], body["max_tokens"]) for path, body in drawn]


def _for_oracle(body: dict[str, Any]) -> dict[str, Any]:
    names = ("messages", "prompt", "max_tokens", "ignore_eos")
    return {name: body[name] for name in names if name in body}
