"""Text of attached files, for every dialect. What a file is follows from its bytes, unless its type says that
they are no text: browsers name a TypeScript file a video."""

from __future__ import annotations

import re

from msgspec import Struct

from broker.dialects.data_urls import MediaError, read_data_url
from protocol.errors import Code, RequestError

_DATA_URL = re.compile(r"\s*data:([^,]{0,1000})", re.IGNORECASE)
_CHARSET = re.compile(r";\s*charset=\"?([\w.:-]+)")
_CHARSETS = ("utf-8", "utf8", "utf-16", "utf-32", "us-ascii", "iso-", "windows-", "shift_jis", "euc-", "gb")
"""Beginnings of the names that are taken. Python has codecs that are none of text, or slow."""
_NOT_TEXT = re.compile(r"application/pdf|(?:image|audio)/")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class FileData(Struct):
    """A file in the request: `file_data` is a `data:` URL, or base64. No file is stored for prompts, and none
    is fetched."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


def file_text(file: FileData, place: str) -> str:
    """Return a file's name and text. Raises `RequestError` naming its `place`."""
    if not file.file_data:
        why = "'file_data' is required: no other files can be read, neither by id nor by URL"
        raise RequestError(Code.UNSUPPORTED_MEDIA, f"'{place}': {why}.", param=place)
    text = text_in(file.file_data, "", place)
    return f"{file.filename}\n{text}" if file.filename else text


def text_in(encoded: str, media_type: str, place: str) -> str:
    """Return the text of a file, given as a `data:` URL, or as base64 with its media type.

    Raises `RequestError`: `invalid_media` if it cannot be decoded, `unsupported_media` if it is no text.
    """
    header = found[1].lower() if (found := _DATA_URL.match(encoded)) else media_type.lower()
    url = encoded if found else f"data:;base64,{encoded}"
    try:
        data = read_data_url(url, bytes_max=len(url))
    except MediaError as error:
        raise RequestError(Code.INVALID_MEDIA, f"'{place}': {error}.", param=place) from error
    text = None if _NOT_TEXT.match(header) else _decoded(data, header)
    if text is None or text.startswith("%PDF-"):
        kind = "a PDF" if data.startswith(b"%PDF-") else _described(header)
        why = f"is {kind}, which cannot be read: send its text, or its pages as images"
        raise RequestError(Code.UNSUPPORTED_MEDIA, f"'{place}' {why}.", param=place)
    return text


def unsupported_part(kind: str, place: str) -> RequestError:
    """Make the error for a part whose type is known, but which no model here reads."""
    message = f"'{place}': parts of type '{kind}' are not supported: send text, a file of text, or an image."
    return RequestError(Code.UNSUPPORTED_MEDIA, message, param=place)


def _decoded(data: bytes, header: str) -> str | None:
    charset = found[1] if (found := _CHARSET.search(header)) else "utf-8"
    if not charset.startswith(_CHARSETS):
        return None
    if charset in ("utf-8", "utf8"):
        charset = "utf-16" if data.startswith(_UTF_16) else "utf-8-sig"
    try:
        text = data.decode(charset)
    except (UnicodeDecodeError, LookupError):
        return None
    return None if "\0" in text else text


def _described(header: str) -> str:
    media_type = header.partition(";")[0].strip()
    if not media_type or media_type.startswith("text/"):
        return "not text in UTF-8"
    return f"a file of type {media_type[:64]!r}"
