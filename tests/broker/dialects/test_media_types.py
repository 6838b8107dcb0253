"""Media type detection by the first bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from hashlib import sha256

import pytest

from broker.dialects.data_urls import MediaError
from broker.dialects.media_types import NOT_A_VIDEO, NOT_AN_IMAGE, Frame, image_in, video_in
from tests.images import FORMATS, MP4, noise, picture


@pytest.mark.parametrize("mime", FORMATS)
def test_an_image_is_what_its_bytes_show(mime: str) -> None:
    data = noise((40, 30), FORMATS[mime])
    assert image_in(data) == Frame(mime, data, sha256(data).hexdigest())


def test_non_image_data_is_refused() -> None:
    for data in (b"", b"<svg/>", b"RIFF\x10\x00\x00\x00WAVE", b"\x89PN", MP4):
        with pytest.raises(MediaError, match=NOT_AN_IMAGE):
            image_in(data)


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the most memory that Python has allocated during an act."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (MP4, "video/mp4"),
        (b"\x00\x00\x00\x08wide\x00\x00\x00\x00mdat", "video/quicktime"),
        (b"\x00\x00\x00\x14ftypqt  \x00\x00\x02\x00", "video/quicktime"),
        (b"\x1a\x45\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\xf3\x81\x08B\x82\x84webm", "video/webm"),
        (b"\x1a\x45\xdf\xa3\xa3B\x86\x81\x01B\xf7\x81\x01B\xf2\x81\x04B\x82\x88matroska", "video/x-matroska"),
        (b"RIFF\x10\x00\x00\x00AVI LIST", "video/x-msvideo"),
    ],
)
def test_a_video_is_what_its_bytes_show(data: bytes, mime: str) -> None:
    assert video_in(data) == Frame(mime, data, sha256(data).hexdigest())


def test_non_video_data_is_refused() -> None:
    for data in (b"", b"ftyp", picture(), b"RIFF\x10\x00\x00\x00WAVEfmt "):
        with pytest.raises(MediaError, match=NOT_A_VIDEO):
            video_in(data)
