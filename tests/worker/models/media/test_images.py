"""Pixels from image files of any kind, as a model's processor expects them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from protocol.errors import Code, RequestError
from protocol.types import Media
from tests.worker.image_questions import encoded
from worker.models.media import images
from worker.models.media.images import open_image

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


def test_exif_orientation_is_applied() -> None:
    turned = halves()
    exif = turned.getexif()
    exif[0x0112] = 6  # rotate clockwise by 90 degrees
    image = open_image(encoded(turned, "PNG", exif=exif), media())
    assert image.size == (20, 40)
    assert image.getpixel((10, 2)) == RED
    assert image.getpixel((10, 38)) == BLUE


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


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(("size", "reduced"), [((200, 200), (100, 100)), ((301, 299), (76, 75))])
def test_large_image_is_reduced_while_it_is_decoded(
    small_limit: None, kind: str, size: tuple[int, int], reduced: tuple[int, int]
) -> None:
    image = open_image(encoded(halves(size), kind), media())
    assert image.mode == "RGB"
    assert image.width * image.height <= 1.1 * 10_000
    assert abs(image.width - reduced[0]) <= 25
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
