"""Encoding of messages as ZeroMQ frames.

A message is one msgpack frame; media follow it as raw frames, referenced by index, and are not copied into
msgpack. Decoding of any malformed input raises `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from protocol.messages import Generate, Message, ToGateway, ToWorker

MESSAGE_BYTES_MAX = 64 * 2**20
MEDIA_BYTES_MAX = 32 * 2**20
MEDIA_FRAMES_MAX = 64

Frames = Sequence[bytes]
M = TypeVar("M")


class WireError(Exception):
    """Frames that are not a valid message."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, media: Frames = ()) -> list[bytes]:
    """Return the frames of a message. Raises `WireError` for one that the receiver would refuse."""
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot encode: {error}") from error
    frames = [body, *media]
    _check_sizes(frames)
    _check_media(message, media)
    return frames


def _check_sizes(frames: Frames) -> None:
    if not frames:
        raise WireError("no frames")
    if len(frames) - 1 > MEDIA_FRAMES_MAX:
        raise WireError(f"{len(frames) - 1} media frames; the limit is {MEDIA_FRAMES_MAX}")
    if len(frames[0]) > MESSAGE_BYTES_MAX:
        raise WireError(f"message of {len(frames[0])} bytes; the limit is {MESSAGE_BYTES_MAX}")
    for media in frames[1:]:
        if len(media) > MEDIA_BYTES_MAX:
            raise WireError(f"media frame of {len(media)} bytes; the limit is {MEDIA_BYTES_MAX}")


def _check_media(message: object, media: Frames) -> None:
    entries = message.media if isinstance(message, Generate) else []
    expected = [
        frame for m in entries for frame in range(m.frame, m.frame + min(m.frames, MEDIA_FRAMES_MAX + 1))
    ]
    if expected != list(range(len(media))):
        raise WireError(f"{len(media)} media frames, but the message refers to {len(expected)}")


class _Decoder(Generic[M]):
    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    def __call__(self, frames: Frames) -> tuple[M, list[bytes]]:
        _check_sizes(frames)
        try:
            message = self._decoder.decode(frames[0])
        # Invalid UTF-8 in a string raises UnicodeDecodeError, deep nesting RecursionError.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"cannot decode: {error}") from error
        media = list(frames[1:])
        _check_media(message, media)
        return message, media


decode_to_worker: _Decoder[ToWorker] = _Decoder(ToWorker)
"""Decode frames received by a worker into a message and media. Raises `WireError`."""

decode_to_gateway: _Decoder[ToGateway] = _Decoder(ToGateway)
"""Decode frames received by the gateway (without the peer's identity). Raises `WireError`."""
