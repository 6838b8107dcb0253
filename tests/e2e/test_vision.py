"""Images with the embedded model over HTTP: all dialects, streamed or not, in batches, and repeated."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from tests.images import data_url
from tests.models.drawings import COLOURS, SHAPES, drawn, file_of, plain
from tests.system import System, eventually

COLOUR, SHAPE, BOTH = "What colour is this image?", "Which shape is this?", "Compare the two images."


def parts(images: Sequence[Image.Image], question: str) -> list[Any]:
    """Return the content of a chat message."""
    seen = [{"type": "image_url", "image_url": {"url": data_url(file_of(image))}} for image in images]
    return [*seen, {"type": "text", "text": question}]


def blocks(images: Sequence[Image.Image], question: str) -> list[Any]:
    """Return the content of an Anthropic message."""
    sources = [
        {"type": "base64", "media_type": "image/png", "data": b64encode(file_of(image)).decode()}
        for image in images
    ]
    return [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": question}]


def chat(client: openai.OpenAI, *images: Image.Image, question: str, stream: bool = False) -> str:
    asked: Any = [{"role": "user", "content": parts(images, question)}]
    if not stream:
        return str(client.chat.completions.create(model="pocket", messages=asked).choices[0].message.content)
    chunks = client.chat.completions.create(model="pocket", messages=asked, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def responses(client: openai.OpenAI, *images: Image.Image, question: str, stream: bool = False) -> str:
    seen = [
        {"type": "input_image", "image_url": data_url(file_of(image)), "detail": "auto"} for image in images
    ]
    asked: Any = [{"role": "user", "content": [*seen, {"type": "input_text", "text": question}]}]
    if not stream:
        return client.responses.create(model="pocket", input=asked).output_text
    events = client.responses.create(model="pocket", input=asked, stream=True)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def messages(claude: anthropic.Anthropic, *images: Image.Image, question: str, stream: bool = False) -> str:
    asked: Any = [{"role": "user", "content": blocks(images, question)}]
    fields: dict[str, Any] = {"model": "pocket", "max_tokens": 60, "messages": asked}
    if not stream:
        return "".join(b.text for b in claude.messages.create(**fields).content if b.type == "text")
    with claude.messages.stream(**fields) as events:
        return "".join(events.text_stream)


@pytest.fixture(params=[chat, responses, messages], ids=lambda form: form.__name__)
def ask(request: pytest.FixtureRequest, client: openai.OpenAI, claude: anthropic.Anthropic) -> Any:
    return partial(request.param, claude if request.param is messages else client)


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
    dice = random.Random(7)
    colours = [dice.choice(list(COLOURS)) for _ in range(16)]

    def look(colour: str) -> str:
        return chat(client, plain(colour), question=COLOUR, stream=dice.random() < 0.5)

    def talk(number: int) -> str:
        return chat(client, question=f"My name is Ida {number}. What is my name?")

    with ThreadPoolExecutor(24) as pool:
        seen, said = pool.map(look, colours), pool.map(talk, range(8))
        assert list(seen) == [f"The image is {colour}." for colour in colours]
        assert all("Ida" in answer for answer in said)


def test_second_question_about_images_does_not_run_them_again(system: System, client: openai.OpenAI) -> None:
    shown = [drawn(shape, colour) for shape in SHAPES for colour in COLOURS]
    said: list[Any] = [{"role": "user", "content": parts(shown, "What do you see?")}]

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
