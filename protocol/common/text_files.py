"""Text files that people write: UTF-8 in every locale, with or without a byte order mark."""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path


class EncodingError(ValueError):
    """A file in another encoding; the message says which, and what to do."""


def read_text(path: Path) -> str:
    """Read a file. Raises `EncodingError` or `OSError`."""
    content = without_mark(path.read_bytes())
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise EncodingError(f"it is not UTF-8 (line {line}): save it as UTF-8") from None


def without_mark(content: bytes) -> bytes:
    """Return the content, or its beginning, without a byte order mark. Raises `EncodingError` for UTF-16."""
    # Without a mark, the first characters of such a file are ASCII, so that one of their bytes is zero.
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise EncodingError("it is UTF-16: save it as UTF-8")
    return content.removeprefix(BOM_UTF8)
