"""Image preprocessing: process a request's images one by one, and expand their placeholders in the prompt.

The chat template writes a placeholder for each image. Upstream's processor replaces it with longer text: a
token for each patch, row separators, tiles. Both are found by probing. An image's expansion depends on the
image alone, so it is cached by salt and digest together with its arrays. A prompt is assembled from these
expansions and tokenized once; its tokens equal those that the processor makes of the whole prompt.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from protocol.errors import Code, RequestError
from protocol.types import Media
from worker.input.media.images import PixelBudget, open_image, reading, unreadable
from worker.input.media.processor import Processed, Processor
from worker.input.media.video_frames import FRAMES_A_SECOND
from worker.input.media.videos import Video, open_video
from worker.input.prompts.boundaries import Messages
from worker.input.prompts.template import TEMPLATE_ERRORS, Render, attempt
from worker.values import NEVER, CancelToken, ImageInput

PROCESSED_BYTES_MAX = 2**28
"""Size of the cache of preprocessed images, which the next turn of a conversation contains again."""
_BEFORE, _BEHIND = "firstly", "lastly"
_PROBE = Image.linear_gradient("L").resize((96, 64)).convert("RGB")

Encode = Callable[[str], list[int]]

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """A preprocessed image or video. `processed`: the text for its placeholder, and the encoder's inputs.
    `tokens`: of that text, from the first added token to the last; these are the same in every prompt."""

    kind: Kind
    digest: str
    processed: Processed
    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the cache."""
        return self.processed.nbytes + 8 * len(self.tokens)

    @classmethod
    def of(
        cls, kind: Kind, digest: str, processed: Processed, encode: Encode, added: Collection[int]
    ) -> ProcessedImage:
        """Build from processor output. `added`: the tokenizer's added tokens. Raises `ValueError` if the text
        has none."""
        tokens = encode(processed.text)
        marks = [index for index, token in enumerate(tokens) if token in added]
        if not marks:
            raise ValueError("the text that represents an image contains no added token")
        return cls(kind, digest, processed, tuple(tokens[marks[0] : marks[-1] + 1]))


@dataclass(frozen=True, slots=True)
class ImagePlaceholders:
    """Image layout of a model's prompts, found by probing.

    `placeholders`: what the template writes, by kind. `text_marker`: represents an image in the messages if
    the template reads no content parts; None: it does. `token_bytes`: bytes of an encoded image's embedding
    per token; 0: not measured yet.
    """

    placeholders: Mapping[Kind, str]
    text_marker: str | None
    token_bytes: int = 0


class ImagePreprocessor:
    """Image preprocessor of one model with its cache, shared by the model's preparers and thread-safe."""

    def __init__(
        self, processor: Callable[[], Processor], found: ImagePlaceholders, reserved: Collection[int]
    ) -> None:
        """`processor`: returns the processor; called with the first image, on any thread. `reserved`: tokens
        that the network interprets as parts of an image."""
        self.placeholders = found.placeholders
        self._processor = processor
        self._token_bytes = found.token_bytes
        self._mark = found.text_marker
        self._reserved = frozenset(reserved)
        self._places = re.compile("|".join(f"({re.escape(each)})" for each in found.placeholders.values()))
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], ProcessedImage] = OrderedDict()
        """By salt and digest: the time to the first token must not reveal what another client has sent."""
        self._bytes = 0

    def template(self, render: Render) -> Render:
        """Wrap the model's template so that it accepts content parts."""
        return render if self._mark is None else with_marks(render, self._mark)

    # --- images ---

    def check_kind(self, kind: Kind, media: Media) -> None:
        """Raise `RequestError` if the model does not accept images or videos, whichever `kind` is."""
        if kind not in self.placeholders:
            message = f"This model does not accept {kind}s."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=media.param or "messages")

    def preprocess(
        self,
        kind: Kind,
        media: Media,
        frames: Sequence[bytes],
        encode: Encode,
        added: Collection[int],
        cancel_token: CancelToken = NEVER,
        *,
        salt: str = "",
        budget: PixelBudget | None = None,
    ) -> ProcessedImage:
        """Return a preprocessed image of a request, from the cache if one with its salt is there.

        `frames`: its files. `added`: the tokenizer's added tokens. `budget`: of the request. Raises
        `RequestError`, and `PreparationCancelled` after a cancellation.
        """
        self.check_kind(kind, media)
        if not frames or len(frames) != media.frames:
            raise unreadable(media, "its data is missing")
        digest = _digest(kind, media.pixels_max, frames)
        key = (salt, digest)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        cancel_token.check()
        processed = self._process(kind, media, frames, cancel_token, budget)
        looked = ProcessedImage.of(kind, digest, processed, encode, added)
        self._keep(key, looked)
        return looked

    def _process(
        self,
        kind: Kind,
        media: Media,
        frames: Sequence[bytes],
        cancel_token: CancelToken,
        budget: PixelBudget | None,
    ) -> Processed:
        placeholder, processor = self.placeholders[kind], self._processor()
        if kind == "image":
            image = open_image(frames[0], media, budget)
            with reading(media, _unsuitable(image)):
                return processor.see(placeholder, [image])
        video = open_video(frames, media, cancel_token, budget)
        with reading(media, _unsuitable(video.frames[0])):
            return processor.watch(placeholder, video)

    def _keep(self, key: tuple[str, str], looked: ProcessedImage) -> None:
        with self._lock:
            if key in self._kept:  # another thread processed it at the same time
                return
            self._bytes += looked.nbytes
            self._kept[key] = looked
            while self._bytes > PROCESSED_BYTES_MAX:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

    # --- prompts ---

    def expand(self, text: str, looked: Sequence[ProcessedImage]) -> str | None:
        """Expand the placeholders of a rendered prompt, in order. None: they do not match the images; further
        images may remain."""
        kinds = list(self.placeholders)
        parts = self._places.split(text)
        step = len(kinds) + 1
        written = [parts[0]]
        for place in range(len(parts) // step):
            found = parts[1 + place * step : (place + 1) * step]
            if place >= len(looked) or found[kinds.index(looked[place].kind)] is None:
                return None
            written += [looked[place].processed.text, parts[(place + 1) * step]]
        return "".join(written)

    def count(self, text: str) -> int:
        """Return the number of placeholders in a rendered prompt."""
        return sum(1 for _ in self._places.finditer(text))

    def place(self, tokens: Sequence[int], looked: Sequence[ProcessedImage]) -> list[ImageInput] | None:
        """Locate images in the tokens of an expanded prompt. None: an image is missing, or there are image
        tokens that belong to no image."""
        images, end, strays = [], 0, 0
        for each in looked:
            first = _find(tokens, each.tokens, end)
            if first is None:
                return None
            strays += self._count_reserved(tokens[end:first])
            images.append(self._picture(each, first))
            end = images[-1].end
        strays += self._count_reserved(tokens[end:])
        return None if strays else images

    def _count_reserved(self, tokens: Sequence[int]) -> int:
        return sum(token in self._reserved for token in tokens)

    def _picture(self, looked: ProcessedImage, first: int) -> ImageInput:
        nbytes = self._token_bytes * len(looked.tokens)
        return ImageInput(looked.digest, first, looked.tokens, looked.processed.inputs, nbytes)

    def literal(self, messages: Messages) -> str | None:
        """Return a placeholder that a message contains as text, if any."""
        for text in texts_of(messages):
            if found := self._places.search(text):
                return found[0]
        return None


def _unsuitable(image: Image.Image) -> str:
    size = f"{image.width} × {image.height}"
    return f"the model's processor accepts no size or aspect ratio like {size} pixels"


def _digest(kind: Kind, pixels_max: int | None, frames: Sequence[bytes]) -> str:
    digest = hashlib.sha256(f"{kind} {pixels_max} {[len(frame) for frame in frames]}".encode())
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()


def _find(tokens: Sequence[int], part: Sequence[int], start: int) -> int | None:
    """Return the first index of `part` from `start` on."""
    wanted, last = list(part), len(tokens) - len(part)
    while start <= last:
        try:
            start = tokens.index(wanted[0], start, last + 1)
        except ValueError:
            return None
        if list(tokens[start : start + len(wanted)]) == wanted:
            return start
        start += 1
    return None


# --- probing ---


def find_places(processor: Processor, render: Render) -> ImagePlaceholders:
    """Probe the placeholders. Raises `ValueError` if the template writes none that the processor expands."""
    images = [{"type": "image"}]
    placeholder, mark = _placeholder(render, images), None
    if not _sees(processor, placeholder):
        marked = ((with_marks(render, each), each) for each in processor.marks)
        tried = ((_placeholder(template, images), each) for template, each in marked)
        placeholder, mark = next((found for found in tried if _sees(processor, found[0])), ("", None))
    if not placeholder:
        raise ValueError("its chat template has no place for images")
    placeholders: dict[Kind, str] = {"image": placeholder}
    video = _placeholder(render, [{"type": "video"}])
    if video and video != placeholder and processor.has_videos and _watches(processor, video):
        placeholders["video"] = video
    return ImagePlaceholders(placeholders, mark)


def _placeholder(render: Render, parts: list[dict[str, Any]]) -> str:
    """Return what the template writes for `parts`, rendered between two known texts."""
    content = [{"type": "text", "text": _BEFORE}, *parts, {"type": "text", "text": _BEHIND}]
    text = attempt(render, [{"role": "user", "content": content}])
    _, found, behind = text.partition(_BEFORE)
    between, also_found, _ = behind.partition(_BEHIND)
    return between.strip() if found and also_found else ""


def _sees(processor: Processor, placeholder: str) -> bool:
    return bool(placeholder) and _changes(placeholder, lambda: processor.see(placeholder, [_PROBE]))


def _watches(processor: Processor, placeholder: str) -> bool:
    video = Video([_PROBE] * 4, range(4), FRAMES_A_SECOND)
    return _changes(placeholder, lambda: processor.watch(placeholder, video))


def _changes(placeholder: str, process: Callable[[], Processed]) -> bool:
    """Return whether the processor replaces the placeholder."""
    try:
        processed = process()
    except TEMPLATE_ERRORS:  # upstream's processors raise these for unknown placeholders
        return False
    return bool(processed.inputs) and processed.text != placeholder


def kinds_in(messages: Messages) -> list[Kind]:
    """Return the kinds of a conversation's images and videos, in order."""
    contents = [message.get("content") for message in messages]
    types = [part.get("type") for parts in contents if isinstance(parts, list) for part in parts]
    return [kind for kind in types if kind in KINDS]


def texts_of(messages: Messages) -> list[str]:
    """Return all texts of the messages."""
    texts: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return texts


def with_marks(render: Render, mark: str) -> Render:
    """Adapt a template that reads contents as text: an image becomes a marker on a line of its own."""

    def flatten(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = (f"{mark}\n" if part.get("type") == "image" else part.get("text", "") for part in content)
        return "".join(texts)

    def render_flat(messages: Messages, **options: Any) -> Any:
        flat = [{**message, "content": flatten(message.get("content"))} for message in messages]
        return render(flat, **options)

    return render_flat


def with_images_behind(messages: Messages) -> list[Mapping[str, Any]]:
    """Move images of tool results and answers into a user message after them. Consecutive messages of one
    role, such as the results of one turn's calls, stay together."""
    shown: list[Mapping[str, Any]] = []
    images: list[Mapping[str, Any]] = []
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        content = message.get("content")
        if message.get("role") != "user" and isinstance(content, list):
            images += [part for part in content if part.get("type") in KINDS]
            texts = [part.get("text", "") for part in content if part.get("type") not in KINDS]
            message = {**message, "content": "".join(texts)}
        shown.append(message)
        if images and following.get("role") != message.get("role"):
            shown.append({"role": "user", "content": images})
            images = []
    return shown
