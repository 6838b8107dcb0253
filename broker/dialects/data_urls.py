"""Decoding of `data:` URLs (RFC 2397). Error messages never repeat their contents."""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from binascii import a2b_qp

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE | re.ASCII)
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_WHITESPACE = b" \t\r\n\f"
_LINE_BREAKS = b"\t\r\n\f"  # URLs may be folded with these; a space is data


class MediaError(ValueError):
    """An image, a video or its URL is refused. The message is meant for the client."""


def is_elsewhere(url: str, *, fetching: bool = False) -> bool:
    """Return whether the URL must be fetched, which only `fetching` allows, rather than decoded as `data:`.

    Raises MediaError for all other URLs.
    """
    scheme = _SCHEME.match(url.lstrip())
    match scheme and scheme[1].lower():
        case "data":
            return False
        case "http" | "https" if fetching:
            return True
        case "http" | "https":
            raise MediaError("fetching images from URLs is not enabled; send a data: URL")
        case None:
            raise MediaError("not a URL; send a data: URL")
        case other:
            raise MediaError(f"{other}: URLs are not supported; send a data: URL")


def read_data_url(url: str, *, bytes_max: int) -> bytes:
    """Decode a `data:` URL to at most `bytes_max` bytes. Raises MediaError. Its media type is ignored."""
    header, payload = _split(url.strip())
    if "base64" in [parameter.strip().lower() for parameter in header.split(";")[1:]]:
        return _decode_base64(payload, bytes_max)
    return _decode_percent(payload, bytes_max)


def check_size(size_bytes: int, bytes_max: int) -> None:
    """Raise MediaError if `size_bytes` exceeds `bytes_max`."""
    if size_bytes > bytes_max:
        raise MediaError(f"the file is too large: {size_bytes} bytes, at most {bytes_max} are allowed")


def _split(url: str) -> tuple[str, bytes]:
    """Split a `data:` URL into header and payload. Raises MediaError for other URLs."""
    is_elsewhere(url)
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("not a valid data: URL: no comma before its data")
    # Lone surrogates become "?", which neither base64 nor an image begins with.
    return header[len("data:") :], payload.encode("utf-8", "replace")


def _decode_base64(payload: bytes, bytes_max: int) -> bytes:
    # Padding is rebuilt, since many encoders omit it.
    digits = _unquote(payload).translate(None, _WHITESPACE).rstrip(b"=")
    check_size(len(digits) * 3 // 4, bytes_max)
    try:
        return b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except Base64Error as error:
        raise MediaError("the data: URL has invalid base64") from error


def _decode_percent(payload: bytes, bytes_max: int) -> bytes:
    encoded = payload.translate(None, _LINE_BREAKS)
    check_size(len(encoded) - 2 * encoded.count(b"%"), bytes_max)
    return _unquote(encoded)


def _unquote(encoded: bytes) -> bytes:
    """Resolve percent-escapes with the quoted-printable decoder, which is in C and differs only in its sign.

    For a hostile URL, urllib's unquote_to_bytes takes seconds, and forty times the memory of the URL.
    """
    if _BROKEN_ESCAPE.search(encoded):
        raise MediaError("the data: URL has an invalid percent-escape")
    if b"%" not in encoded:
        return encoded
    return a2b_qp(encoded.replace(b"=", b"=3D").replace(b"%", b"="))
