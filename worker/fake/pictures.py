"""The images of a scripted prompt: a few tokens each, encoded in the time that the prompt says."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.parts import Media
from worker.fake.script import Script
from worker.pictures import MEDIA_KEYS, Blob, Picture

IMAGE_TOKENS = 4
_IMAGE_BYTES = 64
_LOOK_MS = "look_ms"
_PLACEHOLDERS = {"image", "video"}


def pictures_in(
    messages: Sequence[Mapping[str, Any]], told: Sequence[Media], frames: Sequence[bytes], script: Script
) -> tuple[Picture, ...]:
    """The images of a conversation, where they stand between its words."""
    digests = (_digest(frames[media.frame : media.frame + media.frames]) for media in told)
    inputs = {_LOOK_MS: Blob("F64", (), struct.pack("<d", -1.0 if script.blind else script.look_ms))}
    return tuple(
        Picture(digest, first, (1,) * IMAGE_TOKENS, inputs, _IMAGE_BYTES)
        for digest, first in zip(digests, _places(messages), strict=False)
    )


def with_keys(words: Sequence[int], pictures: Sequence[Picture]) -> tuple[int, ...]:
    """A prompt's tokens, with the keys of its images between the words. The last is none of them."""
    tokens = list(words)
    for picture in pictures:
        tokens[picture.first : picture.first] = picture.keys()
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
    """What the engine has encoded, and who was shown what: it holds the schedule to the contract."""

    _kept: set[str] = field(default_factory=set)
    _shown: dict[str, _Shown] = field(default_factory=dict)

    def look(self, picture: Picture) -> int:
        """Take the time that the image's prompt asks for. Raises `RuntimeError` where it says so."""
        (look_ms,) = struct.unpack("<d", picture.inputs[_LOOK_MS].data)
        if look_ms < 0:
            raise RuntimeError("scripted: the image cannot be encoded")
        time.sleep(look_ms / 1000)
        self._kept.add(picture.digest)
        return picture.nbytes

    def forget(self, digest: str) -> None:
        self._kept.discard(digest)

    def show(self, row: str, pictures: Sequence[Picture]) -> None:
        self._shown[row] = _Shown(tuple(pictures))

    def ran(self, row: str, tokens: Sequence[int]) -> None:
        """A part of a prompt is run. It must have been shown, and what it has of images encoded."""
        shown = self._shown.get(row)
        if shown is None:
            assert all(token < MEDIA_KEYS for token in tokens), f"{row} was shown no images"
            return
        begin, shown.at = shown.at, shown.at + len(tokens)
        for picture in shown.pictures:
            behind = picture.first >= shown.at or picture.end <= begin
            assert behind or picture.digest in self._kept, f"an image of {row} is not encoded"

    def restored(self, row: str, tokens: int) -> None:
        if row in self._shown:
            self._shown[row].at = tokens

    def copy(self, row: str, copy: str) -> None:
        if row in self._shown:
            self._shown[copy] = replace(self._shown[row])

    def drop(self, row: str) -> None:
        self._shown.pop(row, None)

    def clear(self) -> None:
        """Forget every row."""
        self._shown.clear()


@dataclass(slots=True)
class _Shown:
    """So many tokens of a row have been run."""

    pictures: tuple[Picture, ...]
    at: int = 0
