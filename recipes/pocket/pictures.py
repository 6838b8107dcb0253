"""Picture dialogues: one shape on a background, drawn with numpy, and questions about colours and shapes."""

from __future__ import annotations

import numpy as np

from recipes.pocket.dialogue import Dialogue, Image, Message, assistant, user
from recipes.pocket.fillers import Fillers

SHAPES = ("circle", "square", "triangle", "cross")
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (30, 60, 220), "yellow": (245, 220, 40),
    "orange": (250, 140, 20), "purple": (130, 40, 160), "pink": (250, 140, 190), "brown": (120, 70, 30),
    "black": (10, 10, 10), "white": (245, 245, 245), "grey": (128, 128, 128),
}  # fmt: skip
_NEUTRAL = ("white", "white", "black", "grey")
# Pure colours as drawing programs name them, far from the palette's.
_PURE: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "orange": (255, 165, 0), "purple": (128, 0, 128), "pink": (255, 192, 203), "brown": (165, 42, 42),
    "black": (0, 0, 0), "white": (255, 255, 255), "grey": (128, 128, 128),
}  # fmt: skip
_SIZES = ((64, 64), (64, 64), (64, 64), (64, 64), (64, 64), (64, 96), (96, 64), (32, 64), (96, 96))
_JITTER = 14

_ASK_COLOUR = (
    "What colour is this image?", "What colour is this image?", "What color is this image?",
    "Which colour is this?", "What colour is this?", "What is the colour of this image?", "Name the colour.",
    "What colour do you see?", "What color is it?", "What colour is this picture?",
)  # fmt: skip
_ASK_SHAPE_COLOUR = (
    "What colour is the {s}?", "What colour is the shape?", "Which colour has the {s}?",
    "What color is the {s}?",
)  # fmt: skip
_ASK_SHAPE = (
    "Which shape is this?", "Which shape is this?", "What shape is this?", "Which shape is in the image?",
    "What shape do you see?", "Name the shape.", "What shape is in this picture?",
)  # fmt: skip
_ASK_BOTH = (
    "What is in this image?", "Describe this image.", "What do you see?", "What is this?",
    "Describe the picture.",
)  # fmt: skip
_ASK_GROUND = ("What colour is the background?", "Which colour is the background?")
_ASK_SAME_COLOUR = ("Are the two images the same colour?", "Do both images have the same colour?")
_ASK_SAME_SHAPE = ("Do both images show the same shape?", "Is it the same shape in both images?")
_ASK_EACH = (
    "What colours are the two images?", "Compare the two images.", "Describe both images.",
    "What is in each image?",
)  # fmt: skip


class Picture:
    """A drawn image and its contents; `shape` is None if one colour fills it."""

    def __init__(self, fill: Fillers, *, plain: bool) -> None:
        self.height, self.width = fill.pick(_SIZES)
        self.colour = fill.pick(tuple(PALETTE))
        self.shape = None if plain else fill.pick(SHAPES)
        self.ground = self.colour if plain else _ground(fill, self.colour)
        self.pixels = self._draw(fill)

    @property
    def text(self) -> str:
        return self.colour if self.shape is None else f"{self.colour} {self.shape}"

    def _draw(self, fill: Fillers) -> Image:
        pixels = np.empty((self.height, self.width, 3), dtype=np.float32)
        pixels[:] = _shade(fill, self.ground)
        if self.shape is not None:
            cover = _cover(fill, self.shape, self.height, self.width)[..., None]
            if fill.chance(0.3):
                # As drawing programs without antialiasing.
                cover = np.round(cover)
            pixels = pixels * (1 - cover) + _shade(fill, self.colour) * cover
        return np.clip(pixels, 0, 255).astype(np.uint8)


def _ground(fill: Fillers, colour: str) -> str:
    while True:
        ground = fill.pick(_NEUTRAL) if fill.chance(0.8) else fill.pick(tuple(PALETTE))
        if ground != colour:
            return ground


def _shade(fill: Fillers, colour: str) -> np.ndarray:
    """Return a shade of `colour`; the shades' checksums are split between training and evaluation."""
    base = PALETTE[colour] if fill.chance(0.6) else _PURE[colour]
    while True:
        shade = [min(255, max(0, part + fill.number(-_JITTER, _JITTER))) for part in base]
        if fill.ours(str(shade)):
            return np.array(shade, dtype=np.float32)


def _cover(fill: Fillers, shape: str, height: int, width: int) -> np.ndarray:
    """Return the share of each pixel that the shape covers, 0 to 1, smooth at the edge."""
    radius = fill.number(11, min(height, width) // 2 - 2)
    y0 = fill.number(radius, height - radius)
    x0 = fill.number(radius, width - radius)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    y, x = rows - y0 + 0.5, columns - x0 + 0.5
    match shape:
        case "circle":
            distance = np.hypot(x, y) - radius
        case "square":
            distance = np.maximum(np.abs(x), np.abs(y)) - radius * 0.85
        case "triangle":
            distance = np.maximum(y - radius * 0.75, 0.9 * np.abs(x) - (y + radius) * 0.45)
        case _:
            arm = radius * 0.3
            inner = np.minimum(np.abs(x), np.abs(y)) - arm
            distance = np.maximum(inner, np.maximum(np.abs(x), np.abs(y)) - radius)
    cover: np.ndarray = np.clip(0.5 - distance, 0, 1)
    return cover


def picture(fill: Fillers) -> Dialogue:
    """Return a dialogue about one image, with one to three questions."""
    seen = Picture(fill, plain=fill.chance(0.3))
    # A later answer can be copied from an earlier one; only the first needs the image.
    asked = [_question(fill, seen) for _ in range(fill.pick((1, 1, 1, 2, 3)))]
    messages: list[Message] = []
    for question, answer in asked:
        messages += [_with_images(fill, question, 0 if messages else 1), assistant(answer)]
    return Dialogue("picture", messages, thought="I look at the image.", images=[seen.pixels])


def _question(fill: Fillers, seen: Picture) -> tuple[str, str]:
    if seen.shape is None:
        if fill.chance(0.15):
            return fill.pick(_ASK_BOTH), f"The image is {seen.colour}."
        return fill.pick(_ASK_COLOUR), f"The image is {seen.colour}."
    kind = fill.number(0, 9)
    if kind < 4:
        return fill.pick(_ASK_SHAPE), f"It is a {seen.shape}."
    if kind < 7:
        return fill.pick(_ASK_SHAPE_COLOUR).format(s=seen.shape), f"The {seen.shape} is {seen.colour}."
    if kind < 9 and seen.ground in _NEUTRAL and seen.colour not in _NEUTRAL:
        return fill.pick(_ASK_COLOUR), f"The {seen.shape} is {seen.colour}."
    if kind == 8:
        return fill.pick(_ASK_GROUND), f"The background is {seen.ground}."
    return fill.pick(_ASK_BOTH), f"It is a {seen.text} on {seen.ground}."


def pair(fill: Fillers) -> Dialogue:
    """Return a dialogue that compares two images in one message."""
    plain = fill.chance(0.4)
    first, second = Picture(fill, plain=plain), Picture(fill, plain=plain)
    if fill.chance(0.35):
        # Otherwise equal colours or shapes would be too rare to learn.
        second.colour, second.shape = first.colour, first.shape
        second.ground = first.colour if plain else _ground(fill, first.colour)
        second.pixels = second._draw(fill)
    messages: list[Message] = []
    for _ in range(fill.number(1, 2)):
        question, answer = _comparison(fill, first, second)
        messages += [_with_images(fill, question, 0 if messages else 2), assistant(answer)]
    return Dialogue("pair", messages, thought="I compare the images.", images=[first.pixels, second.pixels])


def _comparison(fill: Fillers, first: Picture, second: Picture) -> tuple[str, str]:
    kind = fill.number(0, 3)
    if kind == 0:
        same, word = first.colour == second.colour, "colour"
        question, one, two = fill.pick(_ASK_SAME_COLOUR), first.colour, second.colour
    elif kind == 1 and first.shape and second.shape:
        same, word = first.shape == second.shape, "shape"
        question, one, two = fill.pick(_ASK_SAME_SHAPE), first.shape, second.shape
    else:
        return fill.pick(_ASK_EACH), f"The first is {_a(first)}, the second is {_a(second)}."
    if same:
        return question, f"Yes, the {word} is the same: {one}."
    return question, f"No, the first is {one}, the second is {two}."


def _a(seen: Picture) -> str:
    return seen.colour if seen.shape is None else f"a {seen.text}"


def _with_images(fill: Fillers, question: str, count: int) -> Message:
    if not count:
        return user(question)
    parts = [{"type": "image"}] * count
    text = {"type": "text", "text": question}
    return user([*parts, text] if fill.chance(0.7) else [text, *parts])
