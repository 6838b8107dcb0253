"""Pillow drawings that occur in no training script of the embedded model."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 20, 20), "green": (20, 160, 40), "blue": (30, 60, 220), "yellow": (240, 220, 20)}
SHAPES = ("circle", "square", "triangle", "cross")
SIZE = 64
"""Width and height in pixels."""


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (SIZE, SIZE), COLOURS[colour])


def drawn(shape: str, colour: str = "blue") -> Image.Image:
    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(image)
    match shape:
        case "circle":
            pen.ellipse((14, 14, 50, 50), fill=COLOURS[colour])
        case "square":
            pen.rectangle((15, 15, 49, 49), fill=COLOURS[colour])
        case "triangle":
            pen.polygon(((32, 12), (12, 50), (52, 50)), fill=COLOURS[colour])
        case _:
            pen.rectangle((26, 12, 38, 52), fill=COLOURS[colour])
            pen.rectangle((12, 26, 52, 38), fill=COLOURS[colour])
    return image


def file_of(image: Image.Image) -> bytes:
    """Encode an image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
