"""`data:` URLs (RFC 2397) -> bytes. No error repeats what they hold."""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from binascii import a2b_qp

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE | re.ASCII)
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_WHITESPACE = b" \t\r\n\f"
_LINE_BREAKS = b"\t\r\n\f"  # what a URL may be folded with; a space in it stands for itself


class MediaError(ValueError):
    """An image or a video, or its URL, that is not served; the message is fit for the client."""


def is_elsewhere(url: str, *, fetching: bool = False) -> bool:
    """Whether what it stands for must be fetched, which only `fetching` allows; else it is a `data:` URL.
    Raises MediaError for all others."""
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
            raise MediaError(f"{other}: URLs are refused; send a data: URL")


def read_data_url(url: str, *, bytes_max: int) -> bytes:
    """What a `data:` URL of at most `bytes_max` bytes holds, else MediaError. What it says of its type is not
    looked at."""
    header, payload = _split(url.strip())
    if "base64" in [parameter.strip().lower() for parameter in header.split(";")[1:]]:
        return _decode_base64(payload, bytes_max)
    return _decode_percent(payload, bytes_max)


def check_size(size_bytes: int, bytes_max: int) -> None:
    """Raises MediaError."""
    if size_bytes > bytes_max:
        raise MediaError(f"it is too large: {size_bytes} bytes, at most {bytes_max} are allowed")


def _split(url: str) -> tuple[str, bytes]:
    """Header and payload of a data: URL; refuses every other."""
    is_elsewhere(url)
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("not a data: URL: no comma before its data")
    # What is not Unicode text (a lone surrogate) turns into "?", which no base64 and no image begins with.
    return header[len("data:") :], payload.encode("utf-8", "replace")


def _decode_base64(payload: bytes, bytes_max: int) -> bytes:
    # Padding is rebuilt, not demanded: many encoders leave it out.
    digits = _unquote(payload).translate(None, _WHITESPACE).rstrip(b"=")
    check_size(len(digits) * 3 // 4, bytes_max)
    try:
        return b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except Base64Error as error:
        raise MediaError("the data: URL holds bad base64") from error


def _decode_percent(payload: bytes, bytes_max: int) -> bytes:
    encoded = payload.translate(None, _LINE_BREAKS)
    check_size(len(encoded) - 2 * encoded.count(b"%"), bytes_max)
    return _unquote(encoded)


def _unquote(encoded: bytes) -> bytes:
    """Percent-escapes resolved; by way of quoted-printable, which differs in its sign and has a decoder in C.

    urllib's unquote_to_bytes takes forty times the memory of a hostile URL, and seconds.
    """
    if _BROKEN_ESCAPE.search(encoded):
        raise MediaError("the data: URL holds a broken percent-escape")
    if b"%" not in encoded:
        return encoded
    return a2b_qp(encoded.replace(b"=", b"=3D").replace(b"%", b"="))
