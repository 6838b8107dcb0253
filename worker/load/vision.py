"""Probe whether a vision model of mlx-vlm can be served with images.

The probe at load runs a prompt with two images of different sizes as the engine does: image by image, in
chunks that cut through an image. Its logits must equal those of upstream's call over the whole prompt. Models
with cross-attention to images, or in which image tokens attend to later ones, fail; so do processors that
need MLX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from PIL import Image

from worker.input.media.preprocessing import (
    ImagePlaceholders,
    ImagePreprocessor,
    ProcessedImage,
    find_places,
)
from worker.input.media.processor import TEXTUAL, Processor
from worker.input.prompts.prompt import added_tokens, open_tokenizer
from worker.input.prompts.template import render, template_of
from worker.interfaces import ModelError
from worker.load.vlm_text import ERROR_MAX, relative_error
from worker.runner.vision import PIXELS, RowImages, VisionNetwork
from worker.values import EncodedImage

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Configs of image processors. Without them, some of upstream's processors would use wrong defaults."""

_RESERVED = ("image_token_index", "image_token_id", "video_token_index", "video_token_id")
_TOWERS = ("vision_tower", "vision_model", "visual")
"""Attributes of the vision tower, which upstream sets to None if its weights are missing."""
_SIZES = ((96, 64), (64, 112))
_ROW = "trial"


def require_files(folder: Path) -> None:
    """Raise `ModelError` if the folder has no image processor config."""
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        files = " nor ".join(PROCESSOR_FILES)
        raise ModelError(f"there is neither {files} in {folder}. Download them too.")


def require_tower(network: VisionNetwork) -> None:
    """Raise `ModelError` if the weights of the vision tower are missing."""
    if any(getattr(network.whole, name, network) is None for name in _TOWERS):
        raise ModelError("its weights have no vision tower, like mlx-lm's conversions.")


def reserved_by(network: VisionNetwork) -> set[int]:
    """Return the tokens that the network interprets as parts of an image."""
    tokens = (getattr(network.whole.config, name, None) for name in _RESERVED)
    return {token for token in tokens if isinstance(token, int)}


def find_placeholders(folder: Path, processor: Processor) -> ImagePlaceholders:
    """Probe the placeholders. Raises `ValueError` if there is none for images."""
    template = template_of(open_tokenizer(folder, ()))
    if template is None:
        raise ValueError("it has no chat template")
    return find_places(processor, template)


def probe_images(
    image_preprocessor: ImagePreprocessor, processor: Processor, network: VisionNetwork, folder: Path
) -> int:
    """Probe image input; return the bytes of image embeddings per token. Raises `ValueError` if the results
    differ from upstream's."""
    tokenizer = open_tokenizer(folder, ())
    images = [_image(size) for size in _SIZES]
    text, looked = (
        _rendered(image_preprocessor, tokenizer),
        [_look(image_preprocessor, processor, tokenizer, image) for image in images],
    )
    tokens = tokenizer.encode(image_preprocessor.expand(text, looked) or "", add_special_tokens=False)
    placed = image_preprocessor.place(tokens, looked)
    whole = processor.tokenize(text, images)
    # Upstream's tokens may begin with a second BOS token.
    if placed is None or np.asarray(whole["input_ids"])[0, -len(tokens) :].tolist() != tokens:
        raise ValueError("the tokens of an image cannot be located in its processor's output")
    sight = RowImages(network)
    encoded = {image.digest: sight.encode(image) for image in placed}
    token_bytes = max(-(-encoded[image.digest].nbytes // len(image.tokens)) for image in placed)
    sight.set_images(_ROW, tokens, placed)
    cut = placed[0].first + len(placed[0].tokens) // 2
    error = relative_error(_seen(network, sight, tokens, cut, encoded), _upstream(network, tokens, whole))
    if not error <= ERROR_MAX:
        raise ValueError(f"its logits change when an image is run in chunks (by {error:.2f})")
    return token_bytes


def _image(size: tuple[int, int]) -> Image.Image:
    upright, round = Image.linear_gradient("L"), Image.radial_gradient("L")
    return Image.merge("RGB", (upright, round, upright.rotate(90))).resize(size)


def _rendered(image_preprocessor: ImagePreprocessor, tokenizer: TokenizerWrapper) -> str:
    template = template_of(tokenizer)
    assert template is not None, "the processor has been tried with it"
    parts = [{"type": "text", "text": "one"}, {"type": "image"}] * len(_SIZES)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "two"}]}]
    return render(image_preprocessor.template(template), messages)


def _look(
    image_preprocessor: ImagePreprocessor,
    processor: Processor,
    tokenizer: TokenizerWrapper,
    image: Image.Image,
) -> ProcessedImage:
    processed = processor.see(image_preprocessor.placeholders["image"], [image])
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return ProcessedImage.of("image", _digest(image), processed, encode, added_tokens(tokenizer))


def _digest(image: Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _seen(
    network: VisionNetwork, sight: RowImages, tokens: list[int], cut: int, encoded: Mapping[str, EncodedImage]
) -> mx.array:
    """Return the last token's logits, computed as in the engine."""
    caches: Any = network.make_cache()
    sight.prefill(_ROW, cut, caches, encoded)
    sight.prefill(_ROW, len(tokens) - 1 - cut, caches, encoded)
    shifts = mx.array([[sight.shift(_ROW)]], mx.int32)
    return network(mx.array([tokens[-1:]], mx.int32), cache=caches, shifts=shifts)[0, -1]


def _upstream(network: VisionNetwork, tokens: list[int], whole: Mapping[str, Any]) -> mx.array:
    """Return the last token's logits from a single call of upstream's, with all outputs of its processor."""
    told: dict[str, Any] = {}
    for name, value in whole.items():
        array = mx.array(value) if isinstance(value, np.ndarray) else value
        told[name] = array[:, -len(tokens) :] if name in TEXTUAL else array
    ids = told.pop("input_ids")
    del told["attention_mask"]
    features = network.embed(tokens, told).to_dict()
    given = {name: value for name, value in (told | features).items() if value is not None}
    if not _may_be_cut(network.whole, given):
        raise ValueError("its prompts with images cannot be run in chunks")
    given = {name: value for name, value in given.items() if name not in PIXELS}
    logits: mx.array = network.whole.language_model(ids, cache=network.make_cache(), **given).logits
    return logits[0, -1]


def _may_be_cut(whole: Any, given: Mapping[str, Any]) -> bool:
    """Return whether upstream declares that prompts may be run in chunks."""
    for network in (whole, whole.language_model):
        if policy := getattr(network, "chunked_prefill_policy", None):
            embeddings = given["inputs_embeds"]
            return bool(policy(inputs_embeds=embeddings, prefill_kwargs={**given}))
    return not any(getattr(each, "no_chunked_prefill", False) for each in (whole, whole.language_model))
