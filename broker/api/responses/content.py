"""Conversion of item content to chat parts, each image and video with its place in the body."""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Struct

from broker.api.chat.body import FramesPart, ImageURL, VideoPart
from broker.dialects.attached_files import FileData, file_text, unsupported_part
from broker.dialects.body import convert, extra_schema, refer
from broker.dialects.parts import Detail
from protocol.errors import Code, RequestError

Content = str | list[dict[str, Any]]

TEXTS = {
    "encrypted_content": "encrypted_content",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "text": "text",
}
"""Field of the text, by the type of the part."""
FILE = "input_file"
"""Type of a file, which is read if it is text."""
REFUSED = frozenset({"input_audio"})


class InputImage(Struct):
    image_url: ImageURL | str
    detail: Detail | None = None


VISUALS: Mapping[str, type[Struct]] = {
    "computer_screenshot": InputImage,
    "input_image": InputImage,
    "video_url": VideoPart,
    "video": FramesPart,
}
"""Types of the image and video parts. Videos are as in chat, since OpenAI's responses have none."""
_SCHEMAS: dict[str, dict[str, str]] = {
    **{kind: {} for kind in TEXTS},
    **{kind: refer(part.__name__) for kind, part in VISUALS.items()},
    FILE: refer(FileData.__name__),
}
_FORMS = [{"properties": {"type": {"const": kind}}, **schema} for kind, schema in _SCHEMAS.items()]
RawPart = Annotated[dict[str, Any], extra_schema(anyOf=_FORMS, required=["type"])]
"""A part of content, which `content_of` reads."""


def content_of(content: Content | None, place: str) -> Content:
    """Convert the content of a message or a call output. Raises `RequestError` for an invalid part."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def text_of(content: Content | None, place: str) -> str:
    """Return the text of an assistant message. Raises `RequestError` for parts other than text."""
    parts = content_of(content, place)
    if isinstance(parts, str):
        return parts
    for index, part in enumerate(parts):
        if part["type"] != "text":
            raise wrong(f"{place}[{index}]", "an assistant message can only contain text")
    return "\n".join(part["text"] for part in parts if part["text"])


def _part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = part.get("type")
    if isinstance(kind, str) and kind in VISUALS:
        return _visual(part, kind, place)
    if not isinstance(kind, str) or kind not in TEXTS:
        if kind == FILE:
            return {"type": "text", "text": file_text(convert(part, FileData, place), place)}
        if isinstance(kind, str) and kind in REFUSED:
            raise unsupported_part(kind, place)
        why = "a type is required" if kind is None else f"unknown part type {str(kind)[:64]!r}"
        raise wrong(place, why)
    text = part.get(TEXTS[kind])
    if not isinstance(text, str | None):
        raise wrong(f"{place}.{TEXTS[kind]}", "must be a string")
    if kind == "encrypted_content" and text:
        text = plain_text(text) or UNREADABLE
    return {"type": "text", "text": text or ""}


def _visual(part: Mapping[str, Any], kind: str, place: str) -> dict[str, Any]:
    read = convert(part, VISUALS[kind], place)
    kind = "input_image" if isinstance(read, InputImage) else kind
    return {**part, "type": kind, "param": place}


def wrong(place: str, why: str) -> RequestError:
    """Make the error for an invalid part of an item."""
    return RequestError(Code.INVALID_REQUEST, f"'{place}': {why}.", param=place)


# --- `encrypted_content`: reasoning that a client stores as an opaque string and sends back ----------
#
# It is not secret from the client, which may have the same text in `content` and may send any reasoning
# there. So it is encoded, not encrypted. The digest only distinguishes ours from other servers' and from
# damaged ones. There is no key, so it outlives this gateway and every other gateway can read it.

_VERSION = b"rh1"
_DIGEST_BYTES = 12
_CIPHERTEXT = re.compile(r"gAAAA[\w+/-]*={0,2}|[\w+/-]{100,}={0,2}", re.ASCII)
"""A Fernet token, as OpenAI's servers send, or any long text in base64."""
UNREADABLE = "[Encrypted content of another server, which cannot be read here.]"


def seal(thought: str) -> str:
    """Encode reasoning with its digest in front, as URL-safe base64."""
    text = thought.encode()
    return urlsafe_b64encode(_digest(text) + text).decode()


def unseal(sealed: str) -> str | None:
    """Decode reasoning. Returns None if it is another server's or damaged."""
    try:
        raw = urlsafe_b64decode(sealed.encode("ascii"))
        digest, text = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        return text.decode() if digest == _digest(text) else None
    except ValueError:  # invalid base64 or UTF-8
        return None


def plain_text(content: str) -> str | None:
    """Return the text of encrypted content, which many servers send as it is. None: another's ciphertext."""
    if (text := unseal(content)) is not None:
        return text
    return None if _CIPHERTEXT.fullmatch(content) else content


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(_VERSION + text).digest()[:_DIGEST_BYTES]
