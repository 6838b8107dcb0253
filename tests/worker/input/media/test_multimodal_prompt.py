"""Prompts with images: the tokens of upstream's processors, each image in its place, and refusals."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from protocol.errors import Code, RequestError
from tests.models.fixtures import model_folder
from tests.models.vision_models import EYES
from tests.worker.folders import nothing
from tests.worker.image_questions import (
    POCKET,
    Question,
    draw_image,
    draw_question,
    encoded,
    inputs_of,
    upstream,
)
from tests.worker.vision_models import engine_request, loaded, preparer, request
from worker.input.media import preprocessing, processor
from worker.input.media.processor import Processed, Processor
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.runner.vision import array_of
from worker.values import MEDIA_KEYS, EngineRequest

NAMES = (*EYES, POCKET)


def ids_of(request: EngineRequest) -> list[int]:
    """Return a prompt's tokens with image tokens in place of their keys."""
    ids = list(request.tokens)
    for placed in request.images:
        ids[placed.first : placed.end] = placed.tokens
    return ids


def refusal(name: str, question: Question, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        engine_request(name, "bad", question, **fields)
    return caught.value


def asking(*parts: Any, images: Sequence[bytes] = ()) -> Question:
    """Return a question of texts and images; an image is given as None."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return Question(({"role": "user", "content": content},), tuple(images))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_arrays_are_those_of_upstreams_processor(name: str) -> None:
    for images, turns in ((0, 3), (1, 1), (3, 3)):
        question = draw_question(random.Random(images + 10 * turns), images, turns)
        request, upstreams = engine_request(name, "a", question), inputs_of(name, question)
        assert ids_of(request) == upstreams["input_ids"][0].tolist()
        assert len(request.images) == images
        if images:
            assert request.images[-1].end < len(request.tokens)
            assert all(placed.nbytes > 0 for placed in request.images)
        if images == 1:
            (placed,) = request.images
            assert "pixel_values" in placed.inputs
            for key, blob in placed.inputs.items():
                assert mx.array_equal(array_of(blob), upstreams[key])


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_equal_where_images_are_and_a_conversation_has_a_boundary_behind_them(name: str) -> None:
    question = draw_question(random.Random(4), 2)
    first, again = (engine_request(name, id, question) for id in "ab")
    assert first.tokens == again.tokens
    other = engine_request(name, "c", replace(question, images=question.images[::-1]))
    found = first.images[0]
    assert all(token >= MEDIA_KEYS for token in first.tokens[found.first : found.end])
    assert first.tokens[: found.first] == other.tokens[: found.first]
    assert first.tokens[found.first] != other.tokens[found.first]
    further = ({"role": "assistant", "content": "so be it"}, {"role": "user", "content": "and what else"})
    later = engine_request(name, "d", replace(question, messages=(*question.messages, *further)))
    boundary = first.boundaries[-1]
    assert boundary >= first.images[-1].end
    assert later.tokens[:boundary] == first.tokens[:boundary]


class Trap:
    """Replaces MLX's functions by ones that fail on every thread but its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thread = threading.get_ident()
        self.trespasses: list[str] = []
        for name, value in list(vars(mx).items()):
            if callable(value) and not isinstance(value, type):
                monkeypatch.setattr(mx, name, self._guarded(name, value))
        real, trap = mx.array, self

        class Kind(type):
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, real)

            def __call__(cls, *arguments: Any, **options: Any) -> Any:
                trap.note("array")
                return real(*arguments, **options)

        monkeypatch.setattr(mx, "array", Kind("array", (), {}))

    def _guarded(self, name: str, function: Any) -> Any:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.note(name)
            return function(*arguments, **options)

        return guarded

    def note(self, name: str) -> None:
        if threading.get_ident() != self.thread:
            self.trespasses.append(name)


@pytest.mark.parametrize("name", ["qwen3_5-eyes", "gemma4-eyes", "idefics3-eyes"])
def test_the_pool_touches_nothing_of_mlx(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, outcome, load = list[Path](), list[Any](), processor.load_processor

    def noted(folder: Path) -> Processor:
        opened.append(folder)
        return load(folder)

    def begun() -> Model:
        model = ModelLoader(str(model_folder(name)), LoadOptions(probe_folder=tmp_path)).load(nothing)
        assert isinstance(model, Model)
        return model

    monkeypatch.setattr(processor, "load_processor", noted)
    begun()
    model = begun()  # uses the cached result of the first load
    assert len(opened) == 1
    assert model.info.capabilities.images
    question = draw_question(random.Random(random.random()), 2)

    def prepare() -> None:
        outcome.append(model.open_preparer(4096).prepare(request("a", question), question.images))

    trap = Trap(monkeypatch)
    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join(60)
    assert len(outcome[0].images) == 2
    assert trap.trespasses == []
    assert len(opened) == 2
    thread = threading.Thread(target=lambda: mx.eval(mx.array([1]) + mx.zeros(1)))  # the trap snaps
    thread.start()
    thread.join(60)
    assert trap.trespasses == ["array", "zeros", "eval"]


def test_a_model_of_text_names_what_it_cannot_see() -> None:
    question = asking("see", None, images=[draw_image(random.Random(1))])
    with pytest.raises(RequestError) as caught:
        ModelLoader(str(model_folder("dense"))).load(nothing).open_preparer(4096).prepare(
            request("a", question), question.images
        )
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_MEDIA, "image 0")


def calls_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each call of upstream's processor."""
    preparer("llava-eyes")  # the load itself preprocesses a trial image
    calls: list[int] = []
    see = Processor.see

    def counted(self: Processor, text: str, images: Sequence[Image.Image]) -> Processed:
        calls.append(len(images))
        return see(self, text, images)

    monkeypatch.setattr(Processor, "see", counted)
    return calls


def test_an_image_is_prepared_once_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_the_processor(monkeypatch)
    rng = random.Random(random.random())
    files = [draw_image(rng, (64, 64)) for _ in range(4)]
    one = engine_request("llava-eyes", "a", asking("see", None, images=files[:1]))
    again = engine_request("llava-eyes", "b", asking("see", None, "and", None, images=[files[0]] * 2))
    assert calls == [1]
    assert [placed.digest for placed in again.images] == [one.images[0].digest] * 2
    held = sum(memoryview(blob.data).nbytes for blob in one.images[0].inputs.values())
    monkeypatch.setattr(preprocessing, "PROCESSED_BYTES_MAX", 2 * held + held // 2)
    for file in files:
        engine_request("llava-eyes", "c", asking("see", None, images=[file]))
    engine_request("llava-eyes", "d", asking("see", None, None, images=files[2:]))
    assert len(calls) == 4
    engine_request("llava-eyes", "e", asking("see", None, images=[files[0]]))
    assert len(calls) == 5


def test_time_to_prepare_an_image_does_not_depend_on_other_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_the_processor(monkeypatch)
    question = asking("see", None, images=[draw_image(random.Random(random.random()), (64, 64))])
    first, other, again = (
        engine_request("llava-eyes", salt, question, cache_salt=salt) for salt in ("ann", "bob", "ann")
    )
    assert calls == [1, 1]
    assert first.images[0].digest == other.images[0].digest == again.images[0].digest


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_looks_like_an_image_is_none(name: str) -> None:
    image = draw_image(random.Random(1))
    placed = engine_request(name, "a", asking("see", None, "there", images=[image])).images[0]
    pad = max(set(placed.tokens), key=placed.tokens.count)
    words = upstream(name)[1].tokenizer.convert_ids_to_tokens(pad)
    error = refusal(name, asking(f"this {words} too", None, images=[image]))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "messages")
    assert not engine_request(name, "c", asking(f"this {words} alone")).images


def test_invalid_image_is_refused_with_its_parameter() -> None:
    file = draw_image(random.Random(1))
    bomb = encoded(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 100_000
    for data, words in (
        (b"", "file is damaged"),
        (b"GIF89a" + bytes(20), "file is damaged"),
        (bomb, "10000 × 10000"),
        (encoded(Image.new("RGB", (3000, 2))), "aspect ratio"),  # which upstream refuses
    ):
        error = refusal(POCKET, asking("see", None, images=[data]))
        assert (error.code, error.param) == (Code.INVALID_MEDIA, "image 0")
        assert words in str(error)
    for images in (0, 2):  # their number must match the placeholders
        assert refusal(POCKET, asking("see", None, images=[file] * images)).code is Code.INVALID_MEDIA


def test_a_prompt_too_long_by_its_images_is_refused() -> None:
    file = draw_image(random.Random(1), (200, 200))
    one = len(engine_request(POCKET, "a", asking("see", None, images=[file])).tokens)
    few = loaded(POCKET).open_preparer(one)
    question = asking("see", None, None, images=[file, file])
    with pytest.raises(RequestError) as caught:
        few.prepare(request("b", question), question.images)
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED
