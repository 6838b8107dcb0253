"""What bytes are, and which of them are refused before anybody decodes them."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from broker.dialects import formats
from broker.dialects.formats import ANIMATED, BROKEN, NOT_A_VIDEO, NOT_AN_IMAGE, Frame, image_in, video_in
from broker.dialects.media import MediaError
from tests.images import FORMATS, MP4, animation, bomb, noise, picture, png_header

PIXELS_MAX = 10_000

KINDS = {mime: noise((40, 30), kind) for mime, kind in FORMATS.items()}


def refusal(data: bytes, pixels_max: int = PIXELS_MAX) -> str:
    with pytest.raises(MediaError) as caught:
        image_in(data, pixels_max=pixels_max)
    return str(caught.value)


@pytest.mark.parametrize("mime", FORMATS)
def test_an_image_is_what_its_bytes_show_and_keeps_them(mime: str) -> None:
    data = KINDS[mime]
    assert image_in(data, pixels_max=PIXELS_MAX) == Frame(mime, data, sha256(data).hexdigest())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"secret",
        b"<svg/>",
        b"%PDF-1.7",
        b"RIFF\x10\x00\x00\x00WAVE",
        b"BM",
        b"BMW is a car",
        b"\x89PN",
        MP4,
    ],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert refusal(data) == NOT_AN_IMAGE


@pytest.mark.parametrize("mime", FORMATS)
def test_a_header_that_cannot_be_read_is_refused(mime: str) -> None:
    assert refusal(KINDS[mime][:20]) == BROKEN


@pytest.mark.parametrize("mime", FORMATS)
def test_the_limit_of_pixels_is_exact(mime: str) -> None:
    assert image_in(KINDS[mime], pixels_max=1200).mime == mime
    assert refusal(KINDS[mime], 1199) == "the image has too many pixels: 40 x 30, at most 1199 are allowed"


@pytest.mark.parametrize("data", [bomb(), png_header(2**31 - 1, 2**31 - 1)], ids=["whole", "said"])
def test_a_bomb_is_refused_without_its_pixels(data: bytes) -> None:
    tracemalloc.start()
    try:
        assert refusal(data, 64 * 10**6).startswith("the image has too many pixels: ")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(data) + 2**20


def test_a_webp_larger_than_any_canvas_is_refused_before_there_is_one() -> None:
    """Its own library would allocate the canvas with the header."""
    header = bytearray(picture("black", (16, 16), "WEBP", lossless=True))
    at = header.index(b"VP8L") + 9
    header[at : at + 4] = (16_382 | 16_382 << 14).to_bytes(4, "little")
    assert refusal(bytes(header)).startswith("the image has too many pixels: ")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_what_moves_is_refused_and_its_first_frame_alone_is_not(kind: str) -> None:
    assert refusal(animation(kind)) == ANIMATED
    assert image_in(picture(kind=kind), pixels_max=PIXELS_MAX).data == picture(kind=kind)


def test_an_image_with_an_orientation_is_an_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(kind="JPEG", exif=exif)
    assert image_in(data, pixels_max=PIXELS_MAX).data == data


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged EXIF
@settings(max_examples=400, deadline=None)
@given(st.sampled_from([*KINDS.values(), animation("GIF"), animation("PNG"), animation("WEBP")]), st.data())
def test_whatever_is_damaged_is_an_image_or_a_refusal(data: bytes, draws: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draws.draw(st.integers(1, 6))):
        place = draws.draw(st.integers(0, min(len(damaged), 120) - 1))
        damaged[place] = draws.draw(st.integers(0, 255))
    damaged = damaged[: draws.draw(st.integers(0, len(damaged)))]
    try:
        frame = image_in(bytes(damaged), pixels_max=PIXELS_MAX)
    except MediaError:
        return
    with formats._READERS[frame.mime](BytesIO(damaged)) as image:
        assert image.size[0] * image.size[1] <= PIXELS_MAX


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (MP4, "video/mp4"),
        (b"\x00\x00\x00\x14ftypqt  \x00\x00\x02\x00", "video/quicktime"),
        (b"\x00\x00\x00\x08wide\x00\x00\x00\x00mdat", "video/quicktime"),
        (
            b"\x1a\x45\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\xf3\x81\x08B\x82\x84webm",
            "video/webm",
        ),
        (b"\x1a\x45\xdf\xa3\xa3B\x86\x81\x01B\xf7\x81\x01B\xf2\x81\x04B\x82\x88matroska", "video/x-matroska"),
        (b"RIFF\x10\x00\x00\x00AVI LIST", "video/x-msvideo"),
    ],
)
def test_a_video_is_what_its_bytes_show(data: bytes, mime: str) -> None:
    assert video_in(data) == Frame(mime, data, sha256(data).hexdigest())
    assert refusal(data) == NOT_AN_IMAGE


@pytest.mark.parametrize("data", [b"", b"ftyp", picture(), animation("GIF"), b"RIFF\x10\x00\x00\x00WAVEfmt "])
def test_what_is_no_video_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match=NOT_A_VIDEO):
        video_in(data)
