"""Images with the embedded model over HTTP: all dialects, streamed or not, in batches, and repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from tests import dialects
from tests.models.drawings import COLOURS, SHAPES, drawn, file_of, plain
from tests.system import System, eventually

COLOUR, SHAPE, BOTH = "What colour is this image?", "Which shape is this?", "Compare the two images."


def asking(client: Any, dialect: str) -> Callable[..., str]:
    """Return a function that asks the embedded model about images."""

    def ask(*images: Image.Image, question: str, stream: bool = False) -> str:
        return dialects.ask(client, dialect, "pocket", *map(file_of, images), question, stream=stream)

    return ask


@pytest.fixture(params=dialects.DIALECTS)
def ask(request: pytest.FixtureRequest, client: openai.OpenAI, claude: anthropic.Anthropic) -> Any:
    return asking(claude if request.param == "messages" else client, request.param)


@pytest.mark.parametrize("stream", [False, True])
def test_colours_and_shapes_are_seen_in_each_dialect(ask: Any, stream: bool) -> None:
    # Half of them streamed and half whole.
    for colour in list(COLOURS)[stream::2]:
        assert ask(plain(colour), question=COLOUR, stream=stream) == f"The image is {colour}."
    for shape in list(SHAPES)[stream::2]:
        assert ask(drawn(shape), question=SHAPE, stream=stream) == f"It is a {shape}."


def test_swapped_images_give_swapped_answers(ask: Any) -> None:
    assert ask(plain("red"), plain("blue"), question=BOTH) == "The first is red, the second is blue."
    assert ask(plain("blue"), plain("red"), question=BOTH) == "The first is blue, the second is red."


def test_sixteen_at_once_are_all_right_beside_others_without_images(client: openai.OpenAI) -> None:
    dice, chat = random.Random(7), asking(client, "chat")
    colours = [dice.choice(list(COLOURS)) for _ in range(16)]

    def look(colour: str) -> str:
        return chat(plain(colour), question=COLOUR, stream=dice.random() < 0.5)

    def talk(number: int) -> str:
        return chat(question=f"My name is Ida {number}. What is my name?")

    with ThreadPoolExecutor(24) as pool:
        seen, said = pool.map(look, colours), pool.map(talk, range(8))
        assert list(seen) == [f"The image is {colour}." for colour in colours]
        assert all("Ida" in answer for answer in said)


def test_second_question_about_images_does_not_run_them_again(system: System, client: openai.OpenAI) -> None:
    shown = [drawn(shape, colour) for shape in SHAPES for colour in COLOURS]
    content = dialects.parts("chat", [*map(file_of, shown), "What do you see?"])
    said: list[Any] = [{"role": "user", "content": content}]

    def told() -> tuple[str, Any]:
        """Return the answer and its usage."""
        reply = client.chat.completions.create(model="pocket", messages=said)
        return str(reply.choices[0].message.content), reply.usage

    def encoded(lookups: int) -> int:
        """Return how many images the worker has encoded, once it has counted so many lookups."""
        now = pocket(system)
        counted = now["prefix"]["lookups"] >= lookups and not now["running"]
        return int(now["images"]["encoded"]) if counted else 0

    before = pocket(system)["prefix"]["lookups"]
    answer, first = told()
    once = eventually(lambda: encoded(before + 1), within_s=60, what="the first is counted")
    said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you."}]
    _, second = told()
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens
    assert eventually(lambda: encoded(before + 2), within_s=60, what="both are counted") == once


def pocket(system: System) -> dict[str, Any]:
    """Return the status of the embedded model's worker."""
    workers = system.http.get("/v1/status").json()["workers"]
    [worker] = [worker for worker in workers if worker["model"] == "pocket"]
    return dict(worker)
