"""Pixels from image files of any kind, as a model's processor expects them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile

from broker.dialects.media_types import image_in
from protocol.errors import Code, RequestError
from protocol.types import Media
from tests.images import animation, bomb, picture, png_header
from tests.worker.image_questions import encoded
from worker.input.media import images
from worker.input.media.images import open_image, without_metadata

RED, BLUE = (255, 0, 0), (0, 0, 255)


def media(pixels_max: int | None = None) -> Media:
    return Media(frame=0, mime="image/png", sha256="", pixels_max=pixels_max, param="messages[0].content[1]")


def halves(size: tuple[int, int] = (40, 20)) -> Image.Image:
    """Return an image with a red left half and a blue right half."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_has_its_colours_and_others_are_refused(format: str) -> None:
    image = open_image(encoded(halves(), format), media())
    assert (image.mode, image.size) == ("RGB", (40, 20))
    pixels = np.asarray(image).astype(int)
    assert np.abs(pixels[:, :16] - RED).max() < 30
    assert np.abs(pixels[:, 24:] - BLUE).max() < 30
    with pytest.raises(RequestError) as caught:
        open_image(encoded(halves(), "TIFF"), media())
    assert (caught.value.code, caught.value.param) == (Code.INVALID_MEDIA, "messages[0].content[1]")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied_and_a_bad_one_is_none(kind: str) -> None:
    for number in range(1, 9):
        exif = Image.Exif()
        exif.endian, exif[0x0112] = "<>"[number % 2], number
        data = encoded(halves(), kind, exif=exif)
        with Image.open(BytesIO(data)) as file:
            turned = ImageOps.exif_transpose(file).convert("RGB")
        assert open_image(data, media()).tobytes() == turned.tobytes()
        for bad in (
            exif.tobytes()[:20],
            exif.tobytes().replace(b"\x12\x01\3", b"\x12\x01\xff"),
            b"II",
            b"none",
        ):
            open_image(encoded(halves(), kind, exif=bad), media())


def harmless_damage() -> Iterator[tuple[str, bytes]]:
    """Yield images that every viewer shows, with what is wrong with each."""
    data, noise = encoded(halves()), Image.effect_noise((160, 160), 80).convert("RGB")
    for kind in (b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"tRNS", b"gAMA", b"pHYs", b"eXIf", b"acTL"):
        for body in (b"", b"k\0\0junk", b"\xff"):
            chunk = struct.pack(">I", len(body)) + kind + body + bytes(4)
            yield f"a PNG's {kind!r}", data[:33] + chunk + data[33:]
    yield "a PNG's checksums and end", data[:29] + bytes(4) + data[33:-12] + b"more"
    segments = [
        (0xE0, b"JFIF"), (0xE1, b"Exif\0\0II"), (0xE1, b"http://ns.adobe.com/xap/1.0/\0<"), (0xFE, b""),
        (0xE2, b"ICC_PROFILE\0"), (0xE2, b"MPF\0II*\0\xff"), (0xED, b"Photoshop 3.0\08BIM"), (0xEE, b"Adobe"),
    ]  # fmt: skip
    broken = b"".join(struct.pack(">BBH", 255, kind, 2 + len(body)) + body for kind, body in segments)
    for image, is_progressive in ((halves(), False), (noise, False), (noise, True)):
        jpeg = encoded(image, "JPEG", progressive=is_progressive)
        yield "a JPEG's segments", jpeg[:2] + broken + jpeg[2:]
        yield "a JPEG without an end", jpeg[:-2]
        yield "a JPEG that lacks a little", jpeg[: -2 - len(jpeg) // 60]
        yield "a JPEG with more around its end", jpeg[:-2] + bytes(9) + jpeg[-2:] + b"\xff\xd8\xff more"
    webp = encoded(halves(), "WEBP", exif=b"II", xmp=b"<", icc_profile=b"x")
    yield "a WebP's metadata and lengths", webp[:-6] + b"\xff" * 6
    gif = encoded(halves(), "GIF")
    place, extensions = 13 + (3 << (gif[10] & 7) + 1), b"!\xf9\1\0\0!\xff\3abc\1x\0!\xfe\1\xff\0"
    yield "a GIF's extensions", gif[:place] + extensions + gif[place:] + b"more"


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in harmless_damage()])
def test_an_image_is_decoded_whatever_is_wrong_beside_its_pixels(data: bytes) -> None:
    image_in(data)
    assert open_image(data, media()).size in ((40, 20), (160, 160))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_damaged_image_is_refused_in_plain_words(kind: str) -> None:
    data = encoded(Image.effect_noise((160, 160), 80).convert("RGB"), kind)
    for broken in (data[: len(data) // 2], data[:30]):
        with pytest.raises(RequestError) as caught:
            open_image(broken, media())
        assert caught.value.message == "The image cannot be read: its file is damaged, or ends too early."
        assert caught.value.param == "messages[0].content[1]"


def refusal(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        open_image(data, media())
    assert (caught.value.code, caught.value.param) == (Code.INVALID_MEDIA, "messages[0].content[1]")
    return caught.value.message


@pytest.mark.parametrize("data", [bomb(), png_header(2**31 - 1, 2**31 - 1)], ids=["whole", "said"])
def test_a_bomb_is_refused_without_its_pixels(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "load", lambda file: pytest.fail("its pixels are decoded"))
        assert f"more than {images.IMAGE_PIXELS_MAX} pixels" in refusal(data)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animation_is_refused_and_single_frame_is_accepted(kind: str) -> None:
    assert refusal(animation(kind)) == f"The image cannot be read: {images.ANIMATED}."
    assert open_image(picture(kind=kind), media()).size == (8, 6)


def test_a_jpeg_is_decoded_as_a_whole_unless_its_first_scan_has_all_components() -> None:
    data = encoded(halves(), "JPEG")
    place = data.index(b"\xff\xda") + 4
    assert not without_metadata(data).is_whole
    assert without_metadata(data[:place] + b"\x01" + data[place + 1 :]).is_whole
    assert without_metadata(encoded(halves(), "JPEG", progressive=True)).is_whole


def test_images_of_one_request_are_bounded_in_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "REQUEST_PIXELS_MAX", 1700)
    budget = images.PixelBudget()
    for _ in range(2):
        open_image(encoded(halves()), media(), budget)
    with pytest.raises(RequestError, match="at most 1700 pixels in total") as caught:
        open_image(encoded(halves()), media(), budget)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "messages[0].content[1]")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    image = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 5, 10))
    data = encoded(image if mode == "RGBA" else image.convert(mode))
    seen = open_image(data, media())
    assert seen.getpixel((1, 1)) == (0, 0, 0)
    assert seen.getpixel((8, 1)) == (255, 255, 255)


def test_it_has_no_more_pixels_than_wanted_and_a_line_stays_a_line() -> None:
    for pixels_max, size in ((None, (400, 200)), (80_000, (400, 200)), (5_000, (100, 50))):
        assert open_image(encoded(halves((400, 200))), media(pixels_max)).size == size
    assert open_image(encoded(halves((10_000, 1))), media(100)).size == (100, 1)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat images of more than 10,000 pixels as large ones."""
    monkeypatch.setattr(images, "DECODED_PIXELS_MAX", 10_000)


@pytest.mark.parametrize("size", [(200, 200), (301, 299)])
def test_large_jpeg_is_reduced_while_it_is_decoded(small_limit: None, size: tuple[int, int]) -> None:
    image = open_image(encoded(halves(size), "JPEG"), media())
    assert 0.5 * 10_000 < image.width * image.height <= 1.1 * 10_000
    left, right = image.getpixel((2, 2)), image.getpixel((image.width - 3, 2))
    assert np.abs(np.subtract((left, right), (RED, BLUE))).max() < 12


def test_large_image_is_reduced_as_a_whole_would_be_upright_and_on_white(small_limit: None) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (331, 257, 3), np.uint8))
    assert open_image(encoded(noise), media()).tobytes() == noise.reduce(3).tobytes()
    turned = Image.new("RGBA", (400, 200), (0, 0, 0, 0))
    turned.paste((*RED, 255), (0, 0, 200, 200))
    exif = turned.getexif()
    exif[0x0112] = 6
    image = open_image(encoded(turned, "PNG", exif=exif), media())
    assert image.width < image.height
    assert image.getpixel((10, 2)) == RED
    assert image.getpixel((10, image.height - 3)) == (255, 255, 255)
