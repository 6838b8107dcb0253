"""Images of scripted prompts: a few tokens each, encoded in the time that the prompt directs."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.types import Media
from tests.scripted_worker.script import Script
from worker.values import MEDIA_KEYS, ArrayBytes, EncodedImage, ImageInput

IMAGE_TOKENS = 4
_IMAGE_BYTES = 64
_LOOK_MS = "look_ms"
_PLACEHOLDERS = {"image", "video"}


def pictures_in(
    messages: Sequence[Mapping[str, Any]], told: Sequence[Media], frames: Sequence[bytes], script: Script
) -> tuple[ImageInput, ...]:
    """Return the images of a conversation at their positions between its words."""
    digests = (_digest(frames[media.frame : media.frame + media.frames]) for media in told)
    inputs = {_LOOK_MS: ArrayBytes("F64", (), struct.pack("<d", -1.0 if script.blind else script.look_ms))}
    return tuple(
        ImageInput(digest, first, (1,) * IMAGE_TOKENS, inputs, _IMAGE_BYTES)
        for digest, first in zip(digests, _places(messages), strict=False)
    )


def with_keys(words: Sequence[int], images: Sequence[ImageInput]) -> tuple[int, ...]:
    """Return a prompt's tokens with the keys of its images between the words. The last is not a key."""
    tokens = list(words)
    for image in images:
        tokens[image.first : image.first] = image.keys()
    return (*tokens, 1) if tokens and tokens[-1] >= MEDIA_KEYS else tuple(tokens)


def _digest(frames: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(frames)).hexdigest()


def _places(messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    at = 0
    for part in _parts(messages):
        if part.get("type") in _PLACEHOLDERS:
            yield at
            at += IMAGE_TOKENS
        at += len(str(part.get("text", "")).split())


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content") or ""
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content


@dataclass(slots=True)
class FakeSight:
    """The images of each row. Checks that the scheduler follows the contract."""

    _shown: dict[str, _RowImages] = field(default_factory=dict)

    def encode_image(self, image: ImageInput) -> EncodedImage:
        """Encode for the time that the image's prompt directs. Raises `RuntimeError` if it directs so."""
        (look_ms,) = struct.unpack("<d", image.inputs[_LOOK_MS].data)
        if look_ms < 0:
            raise RuntimeError("scripted: the image cannot be encoded")
        time.sleep(look_ms / 1000)
        return EncodedImage(image.digest, image.nbytes)

    def set_images(self, row: str, images: Sequence[ImageInput]) -> None:
        self._shown[row] = _RowImages(tuple(images))

    def ran(self, row: str, tokens: Sequence[int], embeddings: Mapping[str, EncodedImage]) -> None:
        """Note that a chunk is prefilled. `set_images` must have set its row's images; those in the chunk
        come with it."""
        shown = self._shown.get(row)
        if shown is None:
            assert all(token < MEDIA_KEYS for token in tokens), f"the images of {row} were not set"
            return
        begin, shown.at = shown.at, shown.at + len(tokens)
        for image in shown.images:
            behind = image.first >= shown.at or image.end <= begin
            assert behind or image.digest in embeddings, f"an image of {row} is not encoded"

    def restored(self, row: str, tokens: int) -> None:
        if row in self._shown:
            self._shown[row].at = tokens

    def copy(self, row: str, copy: str) -> None:
        if row in self._shown:
            self._shown[copy] = replace(self._shown[row])

    def drop(self, row: str) -> None:
        self._shown.pop(row, None)

    def clear(self) -> None:
        self._shown.clear()


@dataclass(slots=True)
class _RowImages:
    """Images of a row. `at`: number of its tokens that are prefilled."""

    images: tuple[ImageInput, ...]
    at: int = 0
