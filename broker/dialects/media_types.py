"""Media type sniffing: the type of images and videos by their first bytes, whatever a URL or a server claims.

Everything else about a file, such as its size in pixels or damage, is left for the worker to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from broker.dialects.data_urls import MediaError

NOT_AN_IMAGE = "not an image of a supported type: png, jpeg, webp, gif or bmp"
NOT_A_VIDEO = "not a video of a supported type: mp4, mov, webm, mkv or avi"

_BMP_HEADER_BYTES = {12, 40, 52, 56, 64, 108, 124}


@dataclass(frozen=True, slots=True)
class Frame:
    """Media for the worker: the sniffed type, the bytes, and their SHA-256 in hex."""

    mime: str
    data: bytes
    sha256: str


def image_in(data: bytes) -> Frame:
    """Identify the file of an image. Raises MediaError."""
    mime = sniff(data)
    if mime is None:
        raise MediaError(NOT_AN_IMAGE)
    return Frame(mime, data, sha256(data).hexdigest())


def video_in(data: bytes) -> Frame:
    """Identify the file of a video. Raises MediaError."""
    mime = sniff_video(data)
    if mime is None:
        raise MediaError(NOT_A_VIDEO)
    return Frame(mime, data, sha256(data).hexdigest())


def sniff(data: bytes) -> str | None:
    """Return the image type that the first bytes indicate; None if it is not a supported one."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    # Two letters are weak evidence, so the length of the second header is checked too.
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADER_BYTES:
        return "image/bmp"
    return None


def sniff_video(data: bytes) -> str | None:
    """Return the video type that the first bytes indicate; None if it is not a supported one."""
    if data[4:8] == b"ftyp":  # ISO base media file format: MP4 and relatives
        return "video/quicktime" if data[8:12] == b"qt  " else "video/mp4"
    if data[4:8] in (b"moov", b"mdat", b"wide"):  # QuickTime without a file type
        return "video/quicktime"
    if data.startswith(b"\x1a\x45\xdf\xa3"):  # EBML
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "video/x-msvideo"
    return None
