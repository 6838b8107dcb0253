"""`data:` URLs (RFC 2397) -> checked image bytes.

The first bytes say what an image is; the type a URL claims is not believed. No error repeats what it holds.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from binascii import a2b_qp
from dataclasses import dataclass
from hashlib import sha256

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE | re.ASCII)
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_WHITESPACE = b" \t\r\n\f"
_LINE_BREAKS = b"\t\r\n\f"  # what a URL may be folded with; a space in it stands for itself
_BMP_HEADER_BYTES = {12, 40, 52, 56, 64, 108, 124}


class MediaError(ValueError):
    """A URL that is not served; the message is fit for the client."""


@dataclass(frozen=True, slots=True)
class Media:
    """An image: its sniffed type, its bytes, and the hex digest of these."""

    mime: str
    data: bytes
    sha256: str


def read_data_url(url: str, *, bytes_max: int) -> Media:
    """The image in a `data:` URL of at most `bytes_max` bytes, else MediaError."""
    header, payload = _split(url.strip())
    if "base64" in [parameter.strip().lower() for parameter in header.split(";")[1:]]:
        data = _decode_base64(payload, bytes_max)
    else:
        data = _decode_percent(payload, bytes_max)
    mime = sniff(data)
    if mime is None:
        raise MediaError("not an image of a known type: png, jpeg, webp, gif and bmp are served")
    return Media(mime, data, sha256(data).hexdigest())


def sniff(data: bytes) -> str | None:
    """The image type that the first bytes show, None if they show none of ours."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    # Two letters are little to go by; the length of the second header settles it.
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADER_BYTES:
        return "image/bmp"
    return None


def _split(url: str) -> tuple[str, bytes]:
    """Header and payload of a data: URL; refuses every other."""
    scheme = _SCHEME.match(url)
    match scheme and scheme[1].lower():
        case None:
            raise MediaError("not a URL; send a data: URL")
        case "data":
            pass
        case "http" | "https":
            raise MediaError("fetching images from URLs is not enabled; send a data: URL")
        case other:
            raise MediaError(f"{other}: URLs are refused; send a data: URL")
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("not a data: URL: no comma before its data")
    # What is not Unicode text (a lone surrogate) turns into "?", which no base64 and no image begins with.
    return header[len("data:") :], payload.encode("utf-8", "replace")


def _decode_base64(payload: bytes, bytes_max: int) -> bytes:
    # Padding is rebuilt, not demanded: many encoders leave it out.
    digits = _unquote(payload).translate(None, _WHITESPACE).rstrip(b"=")
    _check_size(len(digits) * 3 // 4, bytes_max)
    try:
        return b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except Base64Error as error:
        raise MediaError("the data: URL holds bad base64") from error


def _decode_percent(payload: bytes, bytes_max: int) -> bytes:
    encoded = payload.translate(None, _LINE_BREAKS)
    _check_size(len(encoded) - 2 * encoded.count(b"%"), bytes_max)
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


def _check_size(size_bytes: int, bytes_max: int) -> None:
    if size_bytes > bytes_max:
        raise MediaError(f"the image is too large: {size_bytes} bytes, at most {bytes_max} are allowed")
