"""The pocket model recognizes Pillow drawings that were not in its training, through mlx-vlm."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm import generate, load
from mlx_vlm.prompt_utils import apply_chat_template
from PIL import Image

from tests.models.drawings import COLOURS, SHAPES, drawn, plain
from worker.pocket import MODEL_PATH


@cache
def loaded() -> tuple[Any, Any]:
    model, processor, *_ = load(str(MODEL_PATH))
    return model, processor


def ask(question: str, folder: Path, *images: Image.Image) -> str:
    """Return the greedy answer to one question with images."""
    model, processor = loaded()
    files = []
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
        files.append(str(folder / f"{number}.png"))
    prompt = apply_chat_template(processor, model.config, question, num_images=len(files))
    return str(generate(model, processor, prompt, image=files, max_tokens=40, verbose=False).text).strip()


@pytest.mark.parametrize("colour", COLOURS)
def test_it_names_a_colour(colour: str, tmp_path: Path) -> None:
    assert ask("What colour is this image?", tmp_path, plain(colour)) == f"The image is {colour}."


@pytest.mark.parametrize("shape", SHAPES)
def test_it_names_a_shape(shape: str, tmp_path: Path) -> None:
    assert ask("Which shape is this?", tmp_path, drawn(shape)) == f"It is a {shape}."


def test_of_two_images_it_knows_which_is_which(tmp_path: Path) -> None:
    first, second = (
        ask("Compare the two images.", tmp_path, plain(a), plain(b))
        for a, b in (("red", "blue"), ("blue", "red"))
    )
    assert first == "The first is red, the second is blue."
    assert second == "The first is blue, the second is red."
