"""Questions with known answers: from the script, or recorded from the embedded model before the faults."""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from broker.dialects.parameters import derived_seed
from broker.dialects.tools import as_text
from tests.faults.streams import Call, Client, scripted
from tests.images import data_url, picture
from tests.models.drawings import COLOURS, SHAPES, drawn, file_of
from tests.scripted_worker.eyes import DIGITS
from tests.scripted_worker.text import CALL_CLOSING, CALL_NAME, CALL_OPENING, CALL_TOKENS, WORDS_BEFORE_CALLS
from tests.system import chat_body

TOKENS_MAX = 150
IMAGES_MAX, IMAGES_KNOWN = 3, 12
LOOK_MS_MAX, PREFILL_MS_MAX = 20, 10
TEXTS = ("Count from 1 to 60.", "Repeat: the quick brown fox.", "My name is Ida. What is my name?", "Hi")
FOR_IMAGES = (("What colour is this image?", 1), ("Which shape is this?", 1), ("Compare the two images.", 2))
"""Texts of questions, with their numbers of images."""
FOR_TOOLS = ("What is the tide in Brest?", "What is the tide in Brest and in Porto?", "Hi")
SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "count": {"type": "integer"},
    },
    "required": ["words", "count"],
    "additionalProperties": False,
}
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
    """A request and its expected choices: reasoning, text, tool calls, finish reasons, and total tokens."""

    body: dict[str, object]
    thoughts: list[str]
    texts: list[str]
    calls: list[list[Call]]
    reasons: list[str]
    tokens: int


Source = Callable[[random.Random], Question]


def of_the_scripted(dice: random.Random) -> Question:
    """Yield questions for the scripted engine, whose answers are a function of the prompt."""
    tokens, choices = dice.randint(1, TOKENS_MAX), dice.choice([1, 1, 1, 2])
    thinks, calls = dice.choice([0, 0, dice.randint(1, TOKENS_MAX)]), dice.choice([0, 0, 1, 30])
    directions = [f"!tokens={tokens}", f"!think={thinks}", f"!call={calls}"]
    images = _drawn_images(dice, dice.choice([0, dice.randint(1, IMAGES_MAX)]))
    if images:
        directions += [f"!look={dice.randint(1, LOOK_MS_MAX)}", f"!prefill={dice.randint(0, PREFILL_MS_MAX)}"]
    text = " ".join(["word"] * dice.randint(1, 9) + directions)
    fields: dict[str, object] = {"n": choices, **_form(dice), **_company(dice)}
    if seeded := dice.random() < 0.5:
        fields |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
    seed = int(str(fields.get("seed", 0)))
    seeds = [seed, *(derived_seed(seed, choice) for choice in range(1, choices))]
    seen = [*map(seen_in, images)]
    said = [scripted(text, tokens, each if seeded else 0, seen, thinks) for each in seeds]
    answers = [
        _shown(*_answer(each, thinks, calls, len(seen)), is_streamed="stream" in fields) for each in said
    ]
    thoughts, texts, called, reasons = (list(channel) for channel in zip(*answers, strict=True))
    body = seeing_body(text, images, **fields) if images else chat_body(text, **fields)
    return Question(body, thoughts, texts, called, reasons, choices * (tokens + 1))


def _drawn_images(dice: random.Random, count: int) -> list[str]:
    """Draw from a few images, so that some have already been encoded for another request."""
    return [image_url(dice.randrange(IMAGES_KNOWN)) for _ in range(count)]


@functools.cache
def image_url(number: int) -> str:
    """Return one of 256 images as a `data:` URL."""
    return data_url(picture(f"rgb({number}, 0, 0)", (8, 8)))


def seen_in(url: str) -> str:
    """Return what the scripted engine answers about such an image."""
    return f"png:{sha256(base64.b64decode(url.partition(',')[2])).hexdigest()[:DIGITS]}"


def seeing_body(text: str, urls: Sequence[str], **fields: object) -> dict[str, object]:
    """Return a chat request with images followed by a text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def _answer(said: str, thinks: int, calls: int, seen: int) -> tuple[str, str, list[Call]]:
    """Split the scripted engine's words into reasoning, text and tool calls. `seen`: number of images."""
    words = said.split()
    thoughts, words = words[:thinks], words[thinks:]
    first = seen + WORDS_BEFORE_CALLS
    last = first + calls * CALL_TOKENS
    begins = range(first, min(last, len(words)), CALL_TOKENS)
    called = [_call(words[begin : begin + CALL_TOKENS]) for begin in begins]
    return _spoken(thoughts), _spoken(words[:first] + words[last:]), called


def _shown(
    thoughts: str, text: str, calls: list[Call], *, is_streamed: bool
) -> tuple[str, str, list[Call], str]:
    """Return what clients get, and the finish reason. A call that broke off is no call."""
    whole = [call for call in calls if _is_whole(call)]
    if is_streamed:
        return thoughts, text, calls, "tool_calls" if calls and whole == calls else "stop"
    text += "".join(as_text(*call) for call in calls if not _is_whole(call))
    return thoughts, text, whole, "tool_calls" if whole else "stop"


def _call(words: list[str]) -> Call:
    """Return the tool call of these words, truncated if there are too few."""
    end = CALL_CLOSING if len(words) == CALL_TOKENS else ""
    return CALL_NAME, CALL_OPENING + _spoken(words[1:]) + end


def _is_whole(call: Call) -> bool:
    return call[1].endswith(CALL_CLOSING)


def _spoken(words: list[str]) -> str:
    return "".join(f"{word} " for word in words)


def of_the_embedded(url: str, seed: int, count: int) -> Source:
    """Ask `count` questions one by one without faults, and record the answers."""
    known = [_answered(url, body) for body in _drawn(random.Random(seed), count)]

    def draw(dice: random.Random) -> Question:
        question = dice.choice(known)
        plain = {name: it for name, it in question.body.items() if not name.startswith("stream")}
        return replace(question, body={**plain, **_form(dice)})

    return draw


def _drawn(dice: random.Random, count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        fields: dict[str, object] = {"n": dice.choice([1, 1, 2]), **_company(dice)}
        fields |= {"max_tokens": dice.randint(20, TOKENS_MAX), "ignore_eos": dice.random() < 0.7}
        if number % 2:
            fields |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
        if "tools" not in fields and dice.random() < 0.7:
            question, images = dice.choice(FOR_IMAGES)
            yield seeing_body(question, [_drawing(dice) for _ in range(images)], **fields)
        else:
            yield chat_body(dice.choice(FOR_TOOLS if "tools" in fields else TEXTS), **fields)


def _drawing(dice: random.Random) -> str:
    """Draw an image and return it as a `data:` URL."""
    return data_url(file_of(drawn(dice.choice(SHAPES), dice.choice(list(COLOURS)))))


def _answered(url: str, body: dict[str, object]) -> Question:
    client = Client(url, body)
    client.run()
    reasons, tokens = client.reasons, client.completion_tokens
    return Question(body, client.thoughts, client.texts, client.calls, reasons, tokens)


def _form(dice: random.Random) -> dict[str, object]:
    """Return the fields for a streamed response or a document."""
    return {"stream": True, "stream_options": {"include_usage": True}} if dice.random() < 0.5 else {}


def _company(dice: random.Random) -> dict[str, object]:
    """Draw optional fields: a tool that may or must be called, reasoning with or without a budget, structured
    output, or none of these."""
    thinking: dict[str, object] = {"enable_thinking": True}
    limited = thinking | {"thinking_budget": dice.randint(1, 12)}
    offered: dict[str, object] = {"tools": [TOOL], "parallel_tool_calls": dice.random() < 0.5}
    forced = offered | {"tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "talk", "schema": SCHEMA}}
    held: dict[str, object] = {"response_format": form}
    return dice.choice([{}, offered, thinking, limited, forced, forced | thinking, held, held | thinking])
