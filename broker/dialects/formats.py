"""What bytes are: an image or a video of a known type, and of what size. Nothing is decoded.

The first bytes say what it is; what a URL or a server claims is not believed. Width and height are in its
header; what only the pixels show (that half of them are missing) the worker finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from broker.dialects.headers import HeaderError, read_header
from broker.dialects.media import MediaError

NOT_AN_IMAGE = "not an image of a known type: png, jpeg, webp, gif and bmp are served"
NOT_A_VIDEO = "not a video of a known type: mp4, mov, webm, mkv and avi are served"
BROKEN = "the image is broken: its header cannot be read"
ANIMATED = "the image is animated; send its frames as a video, or one of them"

_BMP_HEADER_BYTES = {12, 40, 52, 56, 64, 108, 124}


@dataclass(frozen=True, slots=True)
class Frame:
    """Media as they go to the worker: the sniffed type, the bytes, and the hex digest of these."""

    mime: str
    data: bytes
    sha256: str


def image_in(data: bytes, *, pixels_max: int) -> Frame:
    """An image that does not move, of at most so many pixels, else MediaError."""
    mime = sniff(data)
    if mime is None:
        raise MediaError(NOT_AN_IMAGE)
    try:
        header = read_header(mime, data)
    except HeaderError:
        raise MediaError(BROKEN) from None
    if header.width * header.height > pixels_max:
        size = f"{header.width} x {header.height}"
        raise MediaError(f"the image has too many pixels: {size}, at most {pixels_max} are allowed")
    if header.is_animated:
        raise MediaError(ANIMATED)
    return Frame(mime, data, sha256(data).hexdigest())


def video_in(data: bytes) -> Frame:
    """The file of a video, else MediaError."""
    mime = sniff_video(data)
    if mime is None:
        raise MediaError(NOT_A_VIDEO)
    return Frame(mime, data, sha256(data).hexdigest())


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


def sniff_video(data: bytes) -> str | None:
    """The same of the file of a video."""
    if data[4:8] == b"ftyp":  # ISO base media: what is like MP4
        return "video/quicktime" if data[8:12] == b"qt  " else "video/mp4"
    if data[4:8] in (b"moov", b"mdat", b"wide"):  # QuickTime before it had a type
        return "video/quicktime"
    if data.startswith(b"\x1a\x45\xdf\xa3"):  # EBML
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "video/x-msvideo"
    return None
