"""Images with the embedded model over HTTP: all dialects, streamed or not, in batches, and repeated."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from tests.images import data_url
from tests.models.drawings import COLOURS, SHAPES, drawn, file_of, plain
from tests.system import System, eventually, running_system

COLOUR, SHAPE, BOTH = "What colour is this image?", "Which shape is this?", "Compare the two images."
DIALECTS = ("chat", "responses", "messages")


@contextmanager
def served(folder: Path) -> Iterator[System]:
    with running_system(folder) as system:
        system.start_worker("--max-running", "32", module="worker")
        system.wait_ready()
        yield system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with served(tmp_path_factory.mktemp("sight")) as system:
        yield system


@pytest.fixture(scope="module")
def claude(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


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


@pytest.fixture(params=DIALECTS)
def ask(request: pytest.FixtureRequest, client: openai.OpenAI, claude: anthropic.Anthropic) -> Any:
    known: dict[str, tuple[Any, Any]] = {
        "chat": (chat, client),
        "responses": (responses, client),
        "messages": (messages, claude),
    }
    form, through = known[request.param]
    return partial(form, through)


@pytest.mark.parametrize("stream", [False, True])
def test_colours_and_shapes_are_seen_in_each_dialect(ask: Any, stream: bool) -> None:
    for colour in COLOURS:
        assert ask(plain(colour), question=COLOUR, stream=stream) == f"The image is {colour}."
    for shape in SHAPES:
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


def test_an_image_of_an_earlier_turn_and_of_a_tools_result_is_still_there(client: openai.OpenAI) -> None:
    history: Any = [
        {"role": "user", "content": parts([plain("green")], COLOUR)},
        {"role": "assistant", "content": "The image is green."},
        {"role": "user", "content": parts([drawn("circle")], SHAPE)},
    ]
    answered = client.chat.completions.create(model="pocket", messages=history).choices[0].message
    assert answered.content == "It is a circle."


def test_a_second_question_about_images_neither_encodes_nor_runs_them_again(tmp_path: Path) -> None:
    shown = [drawn(shape, colour) for shape in SHAPES for colour in COLOURS]
    said: list[Any] = [{"role": "user", "content": parts(shown, "What do you see?")}]
    with served(tmp_path) as system, openai.OpenAI(base_url=system.url + "/v1", api_key="none") as client:
        answer, first = told(client, said)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you."}]
        _, second = told(client, said)
        assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens
        eventually(lambda: worker_of(system)["prefix"]["lookups"] == 2, within_s=10, what="both are counted")
        assert worker_of(system)["images"]["encoded"] == len(shown)


def told(client: openai.OpenAI, said: list[Any]) -> tuple[str, Any]:
    """Return the answer and its usage."""
    reply = client.chat.completions.create(model="pocket", messages=said)
    return str(reply.choices[0].message.content), reply.usage


def worker_of(system: System) -> dict[str, Any]:
    """Return the status of the only worker."""
    (worker,) = system.http.get("/v1/status").json()["workers"]
    return dict(worker)


def test_another_image_in_the_same_words_is_another_prompt(client: openai.OpenAI) -> None:
    answers = [
        chat(client, plain(colour).resize((128, 128)), question=COLOUR) for colour in ("red", "green", "red")
    ]
    assert answers == ["The image is red.", "The image is green.", "The image is red."]


def test_a_broken_image_is_a_400_that_names_it_and_nobody_else_notices(client: openai.OpenAI) -> None:
    broken = data_url(file_of(plain("red"))[:-30])
    asked: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": broken}}, *parts([], COLOUR)]}
    ]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="pocket", messages=asked)
    assert raised.value.param == "messages[0].content[0]"
    assert chat(client, plain("red"), question=COLOUR) == "The image is red."
