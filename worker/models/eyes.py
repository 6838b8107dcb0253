"""A request's images: processed one by one, and put into its prompt where the template has left room.

The chat template writes a placeholder for each image, and upstream's processor something longer in its place:
a token for each patch that the model is shown, marks between rows, tiles. Both are found by trying. What is
written for one image depends on it alone, so that it is kept by the image's digest, with its arrays; a prompt
is laid together of such, tokenized once, and has then the tokens that the processor makes of the whole.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from protocol.errors import Code, RequestError
from protocol.parts import Media
from worker.models.boundaries import Messages
from worker.models.images import open_image, reading, unreadable
from worker.models.parts import Kind, texts_of, with_marks
from worker.models.processor import Processed, Processor
from worker.models.template import TEMPLATE_ERRORS, Render, attempt
from worker.models.videos import FRAMES_A_SECOND, Video, open_video
from worker.pictures import Picture

PROCESSED_BYTES_MAX = 2**28
"""Of images that are kept as the encoder takes them: the next turn of a conversation has them again."""
_BEFORE, _BEHIND = "firstly", "lastly"
_PROBE = Image.linear_gradient("L").resize((96, 64)).convert("RGB")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Looked:
    """An image, or a video, as it goes into a prompt: the text for its placeholder, and of that the tokens
    from the first added one to the last, which are the same wherever it stands."""

    kind: Kind
    digest: str
    processed: Processed
    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.processed.nbytes + 8 * len(self.tokens)

    @classmethod
    def of(
        cls, kind: Kind, digest: str, processed: Processed, encode: Encode, added: Collection[int]
    ) -> Looked:
        """`added`: the tokenizer's added tokens. Raises `ValueError` where none of them is in the text."""
        tokens = encode(processed.text)
        marks = [index for index, token in enumerate(tokens) if token in added]
        if not marks:
            raise ValueError("what stands for an image has no token of its own")
        return cls(kind, digest, processed, tuple(tokens[marks[0] : marks[-1] + 1]))


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a model's images by trying. `placeholders`: what its template writes, by kind. `mark`:
    what messages must say for an image, to a template that reads no parts; None: it does. `token_bytes`: what
    is kept of an image for each of its tokens, once it is encoded; 0: not known yet."""

    placeholders: Mapping[Kind, str]
    mark: str | None
    token_bytes: int = 0


class Eyes:
    """What the preparers of one model share."""

    def __init__(self, processor: Callable[[], Processor], found: Found, reserved: Collection[int]) -> None:
        """`processor`: asked for it with the first image, by any thread. `reserved`: the tokens that the
        network takes for a part of an image."""
        self.placeholders = found.placeholders
        self._processor = processor
        self._token_bytes = found.token_bytes
        self._mark = found.mark
        self._reserved = frozenset(reserved)
        self._places = re.compile("|".join(f"({re.escape(each)})" for each in found.placeholders.values()))
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Looked] = OrderedDict()
        self._bytes = 0

    def template(self, render: Render) -> Render:
        """A template that takes the parts of messages, of one that renders this model's."""
        return render if self._mark is None else with_marks(render, self._mark)

    # --- images ---

    def look(
        self, kind: Kind, media: Media, frames: Sequence[bytes], encode: Encode, added: Collection[int]
    ) -> Looked:
        """An image of a request, whose `frames` these are. `added`: the tokenizer's added tokens. Raises
        `RequestError`."""
        if kind not in self.placeholders:
            message = f"This model takes no {kind}s."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=media.param or "messages")
        if not frames or len(frames) != media.frames:
            raise unreadable(media, "its bytes are missing")
        digest = _digest(kind, media.pixels_max, frames)
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
        processed = self._process(kind, media, frames)
        looked = Looked.of(kind, digest, processed, encode, added)
        self._keep(looked)
        return looked

    def _process(self, kind: Kind, media: Media, frames: Sequence[bytes]) -> Processed:
        placeholder, processor = self.placeholders[kind], self._processor()
        with reading(media):
            if kind == "image":
                return processor.see(placeholder, [open_image(frames[0], media)])
            return processor.watch(placeholder, open_video(frames, media))

    def _keep(self, looked: Looked) -> None:
        with self._lock:
            if looked.digest in self._kept:  # two asked for it at a time
                return
            self._bytes += looked.nbytes
            self._kept[looked.digest] = looked
            while self._bytes > PROCESSED_BYTES_MAX:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

    # --- prompts ---

    def expand(self, text: str, looked: Sequence[Looked]) -> str | None:
        """A rendered prompt with as many images as it has places for, from the first. None: the places are
        not those of the images."""
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
        """How many places a rendered prompt has."""
        return sum(1 for _ in self._places.finditer(text))

    def place(self, tokens: Sequence[int], looked: Sequence[Looked]) -> list[Picture] | None:
        """Where images are in the tokens of an expanded prompt. None: there are tokens of images that belong
        to none."""
        pictures, end, strays = [], 0, 0
        for each in looked:
            first = _find(tokens, each.tokens, end)
            if first is None:
                return None
            strays += self._count_reserved(tokens[end:first])
            pictures.append(self._picture(each, first))
            end = pictures[-1].end
        strays += self._count_reserved(tokens[end:])
        return None if strays else pictures

    def _count_reserved(self, tokens: Sequence[int]) -> int:
        return sum(token in self._reserved for token in tokens)

    def _picture(self, looked: Looked, first: int) -> Picture:
        nbytes = self._token_bytes * len(looked.tokens)
        return Picture(looked.digest, first, looked.tokens, looked.processed.inputs, nbytes)

    def literal(self, messages: Messages) -> str | None:
        """A placeholder that somebody has written into a message as text, if there is one."""
        for text in texts_of(messages):
            if found := self._places.search(text):
                return found[0]
        return None


def _digest(kind: Kind, pixels_max: int | None, frames: Sequence[bytes]) -> str:
    digest = hashlib.sha256(f"{kind} {pixels_max} {[len(frame) for frame in frames]}".encode())
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()


def _find(tokens: Sequence[int], part: Sequence[int], start: int) -> int | None:
    """Where a part first begins, from `start` on."""
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


# --- what is found by trying ---


def find_places(processor: Processor, render: Render) -> Found:
    """Raises `ValueError` where the template has no place for images, or the processor none in the prompt."""
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
    return Found(placeholders, mark)


def _placeholder(render: Render, parts: list[dict[str, Any]]) -> str:
    """What a template writes between two words for what stands between them."""
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
    """Whether the processor knows a placeholder, and writes something else for it."""
    try:
        processed = process()
    except TEMPLATE_ERRORS:  # Python's own: upstream's processors complain of what they do not know
        return False
    return bool(processed.inputs) and processed.text != placeholder
