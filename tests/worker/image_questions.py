"""Random images, questions about them, and mlx-vlm's answers to them: the oracle for vision models."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.generate import stream_generate
from mlx_vlm.utils import load
from PIL import Image

from tests.models.fixtures import model_folder
from worker.pocket import MODEL_PATH

POCKET = "pocket"
SIZES = ((60, 40), (100, 70), (33, 90), (64, 64), (150, 30))
"""Width and height in pixels: larger and smaller than the models' input sizes, tall and wide."""

_WORDS = ("what", "is", "this", "thing", "then", "tell", "me", "of", "all", "colours", "here", "please")


@dataclass(frozen=True, eq=False)
class Question:
    """A canonical conversation with images in their places, and their files."""

    messages: tuple[dict[str, Any], ...]
    images: tuple[bytes, ...]


def folder_of(name: str) -> Path:
    return MODEL_PATH if name == POCKET else model_folder(name)


def draw_image(rng: random.Random, size: tuple[int, int] | None = None, format: str = "PNG") -> bytes:
    """Draw an image of a few large coloured patches."""
    colours = np.frombuffer(rng.randbytes(4 * 4 * 3), np.uint8).reshape(4, 4, 3)
    image = Image.fromarray(colours).resize(size or rng.choice(SIZES), Image.Resampling.BICUBIC)
    return encoded(image, format)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def draw_question(rng: random.Random, images: int, turns: int = 1) -> Question:
    """Draw a question of words and images, with an answer and a question for each further turn."""
    files = tuple(draw_image(rng) for _ in range(images))
    kinds = ["image"] * images + ["text"] * (images + 1)
    rng.shuffle(kinds)
    parts: list[dict[str, Any]] = [
        {"type": kind} | ({} if kind == "image" else {"text": _say(rng)}) for kind in kinds
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts if images else _say(rng)}]
    for _ in range(turns - 1):
        messages += [{"role": "assistant", "content": _say(rng)}, {"role": "user", "content": _say(rng)}]
    return Question(tuple(messages), files)


def _say(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(2, 12))) + " "


@cache
def upstream(name: str) -> tuple[Any, Any]:
    """Return upstream's network and its processor, with end tokens disabled."""
    network, processor = load(str(folder_of(name)))[:2]
    processor.tokenizer.stopping_criteria = lambda token: False
    return network, processor


def rendered(name: str, question: Question) -> str:
    """Return the prompt's text in the form that upstream's processors expect."""
    _, processor = upstream(name)
    messages = [message | {"content": _as_parts(message["content"])} for message in question.messages]
    return str(processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def inputs_of(name: str, question: Question) -> dict[str, Any]:
    """Return the arrays that upstream's processor makes of the whole prompt, by name."""
    _, processor = upstream(name)
    # Without padding: LLaVA's processor passes it to an image processor that refuses it.
    said = processor(text=[rendered(name, question)], images=_opened(question) or None)
    return {key: _tensor(value) for key, value in said.items() if hasattr(value, "__len__")}


def _tensor(value: Any) -> Any:
    """Return an array, or a list of arrays where images differ in size."""
    if isinstance(value, list) and len({np.shape(each) for each in value}) > 1:
        return [mx.array(np.array(each)) for each in value]
    return mx.array(np.array(value))


def _opened(question: Question) -> list[Image.Image]:
    return [Image.open(io.BytesIO(data)).convert("RGB") for data in question.images]


def answer(name: str, question: Question, tokens: int) -> list[int]:
    """Return the greedy answer of upstream alone."""
    network, processor = upstream(name)
    given = inputs_of(name, question)
    given["mask"] = given.pop("attention_mask")
    said = stream_generate(network, processor, "", max_tokens=tokens, temperature=0.0, **given)
    return [each.token for each in said if each.token is not None][:tokens]
