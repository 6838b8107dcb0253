"""A model that sees, of mlx-vlm's: one network for prompts with images and for those without.

Whether a family fits is found by trying, when it is loaded: a prompt with two images of different sizes goes
the engine's way, image by image and in chunks cut within one of them, and must come out as it does from
upstream's own call over the whole of it. Families that attend across to their images, or that let an image's
tokens see those behind them, do not; upstream's processors that cannot be asked without MLX do not either.
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

from worker.contract import ModelError
from worker.engine.sight import PIXELS, Sight, VisionNetwork
from worker.models.eyes import Eyes, Found, Looked, find_places
from worker.models.processor import TEXTUAL, Processor
from worker.models.prompt import added_tokens, open_tokenizer
from worker.models.template import render, template_of
from worker.models.whole import ERROR_MAX, relative_error

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where models say how images are prepared. Some of upstream's processors would guess without."""

_RESERVED = ("image_token_index", "image_token_id", "video_token_index", "video_token_id")
_TOWERS = ("vision_tower", "vision_model", "visual")
"""What upstream sets to None where there are no weights for it."""
_SIZES = ((96, 64), (64, 112))
_ROW = "trial"


def require_files(folder: Path) -> None:
    """Raises `ModelError` where nothing says how images are prepared."""
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        files = " nor ".join(PROCESSOR_FILES)
        raise ModelError(f"there is neither {files} in {folder}. Download them as well.")


def require_tower(network: VisionNetwork) -> None:
    """Raises `ModelError` where there are no weights for what sees."""
    if any(getattr(network.whole, name, network) is None for name in _TOWERS):
        raise ModelError("its weights leave out what sees, as those of mlx-lm's conversions do.")


def reserved_by(network: VisionNetwork) -> set[int]:
    """The tokens that it takes for a part of an image."""
    tokens = (getattr(network.whole.config, name, None) for name in _RESERVED)
    return {token for token in tokens if isinstance(token, int)}


def look_for_places(folder: Path, processor: Processor) -> Found:
    """Raises `ValueError` where there are none for images."""
    template = template_of(open_tokenizer(folder, ()))
    if template is None:
        raise ValueError("it has no chat template")
    return find_places(processor, template)


def try_eyes(eyes: Eyes, processor: Processor, network: VisionNetwork, folder: Path) -> int:
    """Let it see: what is kept of an image for each of its tokens, in bytes. Raises `ValueError` where it is
    not what upstream sees."""
    tokenizer = open_tokenizer(folder, ())
    images = [_image(size) for size in _SIZES]
    text, looked = _rendered(eyes, tokenizer), [_look(eyes, processor, tokenizer, image) for image in images]
    tokens = tokenizer.encode(eyes.expand(text, looked) or "", add_special_tokens=False)
    pictures = eyes.place(tokens, looked)
    whole = processor.tokenize(text, images)
    # Upstream's may begin with what its tokenizer puts before every text, a second time.
    if pictures is None or np.asarray(whole["input_ids"])[0, -len(tokens) :].tolist() != tokens:
        raise ValueError("what its processor writes for an image cannot be told from the rest")
    sight = Sight(network)
    token_bytes = max(-(-sight.look(picture) // len(picture.tokens)) for picture in pictures)
    sight.show(_ROW, tokens, pictures)
    cut = pictures[0].first + len(pictures[0].tokens) // 2
    error = relative_error(_seen(network, sight, tokens, cut), _upstream(network, tokens, whole))
    if not error <= ERROR_MAX:
        raise ValueError(f"it sees images in parts otherwise than as a whole (by {error:.2f})")
    return token_bytes


def _image(size: tuple[int, int]) -> Image.Image:
    upright, round = Image.linear_gradient("L"), Image.radial_gradient("L")
    return Image.merge("RGB", (upright, round, upright.rotate(90))).resize(size)


def _rendered(eyes: Eyes, tokenizer: TokenizerWrapper) -> str:
    template = template_of(tokenizer)
    assert template is not None, "looked for before"
    parts = [{"type": "text", "text": "one"}, {"type": "image"}] * len(_SIZES)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "two"}]}]
    return render(eyes.template(template), messages)


def _look(eyes: Eyes, processor: Processor, tokenizer: TokenizerWrapper, image: Image.Image) -> Looked:
    processed = processor.see(eyes.placeholders["image"], [image])
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Looked.of("image", _digest(image), processed, encode, added_tokens(tokenizer))


def _digest(image: Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _seen(network: VisionNetwork, sight: Sight, tokens: list[int], cut: int) -> mx.array:
    """The last token's logits by the engine's way."""
    caches: Any = network.make_cache()
    sight.prefill(_ROW, cut, caches)
    sight.prefill(_ROW, len(tokens) - 1 - cut, caches)
    shifts = mx.array([[sight.shift(_ROW)]], mx.int32)
    return network(mx.array([tokens[-1:]], mx.int32), cache=caches, shifts=shifts)[0, -1]


def _upstream(network: VisionNetwork, tokens: list[int], whole: Mapping[str, Any]) -> mx.array:
    """The same by one call of upstream's own, told all that its processor says."""
    told: dict[str, Any] = {}
    for name, value in whole.items():
        array = mx.array(value) if isinstance(value, np.ndarray) else value
        told[name] = array[:, -len(tokens) :] if name in TEXTUAL else array
    ids = told.pop("input_ids")
    del told["attention_mask"]
    features = network.embed(tokens, told).to_dict()
    given = {name: value for name, value in (told | features).items() if value is not None}
    if not _may_be_cut(network.whole, given):
        raise ValueError("its prompts with images cannot be run in parts")
    given = {name: value for name, value in given.items() if name not in PIXELS}
    logits: mx.array = network.whole.language_model(ids, cache=network.make_cache(), **given).logits
    return logits[0, -1]


def _may_be_cut(whole: Any, given: Mapping[str, Any]) -> bool:
    """What upstream itself says of it."""
    for network in (whole, whole.language_model):
        if policy := getattr(network, "chunked_prefill_policy", None):
            embeddings = given["inputs_embeds"]
            return bool(policy(inputs_embeds=embeddings, prefill_kwargs={**given}))
    return not any(getattr(each, "no_chunked_prefill", False) for each in (whole, whole.language_model))
