"""Sets of long prompts that share prefixes, with the reference answer of each request.

Each set has prompts that share only the system prompt, prompts that also share about two thirds of their
length with others, conversations of three turns, and prompts that share nothing.
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
CHAT_SHARE = 0.7
ANSWER_TOKENS_MIN = 16
TEMPLATE_TOKENS = 40
"""Maximum tokens that a chat template adds to the texts of a prompt."""

Body = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the prompts, of the shared system prompt and of the answers; requests in a set, and the share
    of greedy ones."""

    prompt_min: int = 600
    prompt_max: int = 3000
    shared: int = 900
    answer_max: int = 150
    requests: int = 24
    greedy: float = 0.6


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """A request body for `path`, with the text and the length of its reference answer."""

    path: str
    body: Body
    text: str
    tokens: int


class PromptTexts:
    """Texts of a given number of tokens, by the tokenizer of a model folder, and prompts of them."""

    def __init__(self, folder: Path, sizes: Sizes, dice: random.Random) -> None:
        from tokenizers import Tokenizer  # a large library that nothing else here needs

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._sizes, self._dice = sizes, dice

    def draw_bodies(self) -> list[tuple[str, Body]]:
        """Return path and body of each request of a new set."""
        rest = self._sizes.prompt_max - self._sizes.shared - TEMPLATE_TOKENS
        shared, long = self._draw(self._sizes.shared), self._draw(rest)
        least = min(rest, max(16, self._sizes.prompt_min - self._sizes.shared))
        return [
            self._with_parameters(self._messages(number, self._dice.randint(least, rest), shared, long))
            for number in range(self._sizes.requests)
        ]

    def _messages(self, number: int, length: int, shared: str, long: str) -> Messages:
        """Return a prompt of the next kind, with `length` tokens after the system prompt."""
        match number % 5:
            case 0:
                return _chat(shared, self._draw(length))
            case 1 | 2:
                common = 2 * length // 3
                return _chat(
                    shared, self._cut(long, common - self._dice.randrange(16)) + self._draw(length - common)
                )
            case 3:
                answer = self._draw(length // 4)
                again = self._cut(answer, 5 + self._dice.randrange(20))
                return _chat(shared, self._cut(long, length // 2), answer, again)
        text = self._draw(self._sizes.shared + length)
        return _chat(self._cut(text, 20), text)

    def _with_parameters(self, messages: Messages) -> tuple[str, Body]:
        """Return path and body of a chat or of a completion of the same texts, greedy or seeded."""
        dice = self._dice
        parameters: Body = {"max_tokens": dice.randint(ANSWER_TOKENS_MIN, self._sizes.answer_max)}
        parameters |= {"ignore_eos": True, "temperature": 0.0}
        if dice.random() >= self._sizes.greedy:
            parameters |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
        if dice.random() < CHAT_SHARE:
            return "/v1/chat/completions", {"messages": messages, **parameters}
        prompt = "\n\n".join(message["content"] for message in messages)
        return "/v1/completions", {"prompt": prompt, **parameters}

    def _draw(self, tokens: int) -> str:
        """Return a text of `tokens` tokens that shares no prefix with others."""
        seed = self._dice.randrange(2**40)
        return self._cut(f"{seed}: " + "".join(make_corpus(20 + tokens // PIECE_TOKENS_MIN, seed)), tokens)

    def _cut(self, text: str, tokens: int) -> str:
        """Return the first `tokens` tokens of `text`."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text if tokens >= len(offsets) else text[: offsets[tokens][0]]


def _chat(system: str, *turns: str) -> Messages:
    spoken = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *spoken]


def with_references(
    folder: Path, oracle: Oracle, drawn: Sequence[tuple[str, Body]], ask: Callable[[str, Body], str]
) -> list[ReferenceRequest]:
    """Add reference answers to requests: upstream's for greedy ones, those of `ask` for seeded ones."""
    greedy = [body for _, body in drawn if not body["temperature"]]
    names = ("messages", "prompt", "max_tokens", "ignore_eos")
    oracle.ask(folder, [{name: body[name] for name in names if name in body} for body in greedy])
    seeded = {id(body): ask(path, body) for path, body in drawn if body["temperature"]}
    texts = seeded | {id(body): answer["text"] for body, answer in zip(greedy, oracle.hear(), strict=True)}
    return [ReferenceRequest(path, body, texts[id(body)], body["max_tokens"]) for path, body in drawn]
