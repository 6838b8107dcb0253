"""Media type detection, and the images that are refused before they are decoded."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from broker.dialects.image_headers import STEPS_MAX, ImageHeader, read_header
from broker.dialects.media import MediaError
from broker.dialects.media_types import ANIMATED, BROKEN, NOT_A_VIDEO, NOT_AN_IMAGE, Frame, image_in, video_in
from tests.images import FORMATS, MP4, animation, bomb, noise, picture, png, png_header

PIXELS_MAX = 10_000

KINDS = {mime: noise((40, 30), kind) for mime, kind in FORMATS.items()}


def refusal(data: bytes, pixels_max: int = PIXELS_MAX) -> str:
    with pytest.raises(MediaError) as caught:
        image_in(data, pixels_max=pixels_max)
    return str(caught.value)


@pytest.mark.parametrize("mime", FORMATS)
def test_an_image_is_what_its_bytes_show_within_the_limit_of_pixels(mime: str) -> None:
    data = KINDS[mime]
    assert image_in(data, pixels_max=1200) == Frame(mime, data, sha256(data).hexdigest(), 1200)
    assert refusal(data, 1199) == "the image has too many pixels: 40 x 30, at most 1199 are allowed"
    assert refusal(data[:20]) == BROKEN


def test_non_image_data_is_refused() -> None:
    for data in (b"", b"<svg/>", b"RIFF\x10\x00\x00\x00WAVE", b"\x89PN"):
        assert refusal(data) == NOT_AN_IMAGE


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the most memory that Python has allocated during an act."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [bomb(), png_header(2**31 - 1, 2**31 - 1)], ids=["whole", "said"])
def test_a_bomb_is_refused_without_its_pixels(data: bytes) -> None:
    assert refusal(data, 64 * 10**6).startswith("the image has too many pixels: ")
    assert peak_bytes(lambda: refusal(data, 64 * 10**6)) < len(data) + 2**20


def test_notes_that_inflate_cost_nothing() -> None:
    """Compressed text chunks are not inflated; Pillow needs a tenth of a second for these 8 kB."""
    notes = [(b"zTXt", b"k%d\0\0" % n + zlib.compress(bytes(2**20 - 16))) for n in range(8)]
    data = png(8, 8, [*notes, (b"IDAT", b"")])
    assert image_in(data, pixels_max=64).mime == "image/png"
    assert peak_bytes(lambda: image_in(data, pixels_max=64)) < 2**18


@pytest.mark.parametrize(
    "data",
    [
        png(8, 8, [(b"tEXt", b"")] * (STEPS_MAX + 1) + [(b"IDAT", b"")]),
        b"\xff\xd8" + b"\xff\xe1\x00\x02" * (STEPS_MAX + 1) + picture(kind="JPEG")[2:],
        picture(kind="GIF")[:13] + b"!\xfe" + b"\x01x" * (STEPS_MAX + 1) + b"\x00;",
        b"RIFF\x10\x00\x00\x00WEBPVP8Z" + bytes(20),
    ],
    ids=["png", "jpeg", "gif", "webp of unknown kind"],
)
def test_a_header_of_too_many_or_unknown_parts_is_not_read_to_its_end(data: bytes) -> None:
    assert refusal(data) == BROKEN


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animation_is_refused_and_single_frame_is_accepted(kind: str) -> None:
    assert refusal(animation(kind)) == ANIMATED
    assert image_in(picture(kind=kind), pixels_max=PIXELS_MAX).data == picture(kind=kind)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(["RGB", "L", "1", "RGBA", "P"]),
    st.booleans(),
)
def test_the_size_is_the_one_that_pillow_reads(
    mime: str, width: int, height: int, mode: str, lossless: bool
) -> None:
    file = BytesIO()
    image = Image.new("RGB" if mode == "RGBA" and mime == "image/jpeg" else mode, (width, height))
    image = image.convert("RGB") if (mime, mode) == ("image/jpeg", "P") else image
    image.save(file, FORMATS[mime], lossless=lossless)
    assert read_header(mime, file.getvalue()) == ImageHeader(width, height)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns about damaged metadata
@settings(max_examples=100)
@given(st.sampled_from([*KINDS.values(), animation("GIF"), animation("PNG"), animation("WEBP")]), st.data())
def test_damaged_image_accepted_within_pixel_limit_as_decoded_by_pillow(
    data: bytes, draws: st.DataObject
) -> None:
    damaged = bytearray(data)
    for _ in range(draws.draw(st.integers(1, 6))):
        place = draws.draw(st.integers(0, min(len(damaged), 120) - 1))
        damaged[place] = draws.draw(st.integers(0, 255))
    damaged = damaged[: draws.draw(st.integers(0, len(damaged)))]
    try:
        image_in(bytes(damaged), pixels_max=PIXELS_MAX)
    except MediaError:
        return
    try:
        with Image.open(BytesIO(damaged)) as image:
            width, height = image.size
    except Exception:  # an image that Pillow cannot open is never decoded
        return
    assert width * height <= PIXELS_MAX


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
    assert refusal(data) == NOT_AN_IMAGE


def test_non_video_data_is_refused() -> None:
    for data in (b"", b"ftyp", picture(), b"RIFF\x10\x00\x00\x00WAVEfmt "):
        with pytest.raises(MediaError, match=NOT_A_VIDEO):
            video_in(data)
