"""The highest memory of decoding: images at the limits of their formats, and videos that lie about theirs."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from broker.dialects.media import MediaError
from broker.dialects.media_types import image_in
from protocol.wire import MEDIA_PIXELS_MAX
from tests.images import FORMATS

GROWTH_MIB_MAX = 400
"""What docs/security.md promises for an image, and a margin for what libraries keep."""
DECODE_MIB_MAX = 650
"""Of the process that decodes a video: its limit, and the libraries."""
PROGRAM = """
import resource, sys
from protocol.errors import RequestError
from protocol.types import Media
from worker.models.media.images import open_image
from worker.models.media.videos import open_video
mime, data = sys.argv[1], open(sys.argv[2], "rb").read()
media = Media(frame=0, mime=mime, sha256="")
def peak(of):
    return resource.getrusage(of).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
before = peak(resource.RUSAGE_SELF)
try:
    open_video([data], media) if mime.startswith("video/") else open_image(data, media)
except RequestError as error:
    print(error.message, file=sys.stderr)
print(peak(resource.RUSAGE_SELF) - before, peak(resource.RUSAGE_CHILDREN))
"""
LARGEST: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "PNG": ("image/png", "RGBA", 8190, {"compress_level": 1}),
    "JPEG": ("image/jpeg", "RGB", 8190, {}),
    "progressive JPEG": ("image/jpeg", "RGB", 6670, {"progressive": True, "subsampling": 0}),
    "progressive CMYK": ("image/jpeg", "CMYK", 5780, {"progressive": True, "subsampling": 0}),
    "WebP": ("image/webp", "RGBA", 4096, {"lossless": True, "method": 0}),
    "GIF": ("image/gif", "P", 8190, {}),
    "BMP": ("image/bmp", "1", 8190, {}),
}


def saved(mime: str, mode: str, side: int, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side), 3 if mode in "P1" else (200,) * len(mode)).save(
        file, FORMATS[mime], **options
    )
    return file.getvalue()


def peak_mib(folder: Path, mime: str, data: bytes) -> list[int]:
    """Return the growth of a process that decodes, and the highest memory of its children."""
    (folder / "media").write_bytes(data)
    program = [sys.executable, "-c", PROGRAM, mime, str(folder / "media")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_image_of_each_format_stays_within_the_promise(name: str, tmp_path: Path) -> None:
    mime, mode, side, options = LARGEST[name]
    data = saved(mime, mode, side, options)
    image_in(data, pixels_max=MEDIA_PIXELS_MAX)
    assert peak_mib(tmp_path, mime, data)[0] < GROWTH_MIB_MAX
    with pytest.raises(MediaError, match=r"too many pixels|too much memory"):
        image_in(saved(mime, mode, side + 30, options), pixels_max=MEDIA_PIXELS_MAX)


def test_a_video_whose_frames_grow_is_decoded_within_a_limit(tmp_path: Path) -> None:
    """The header and the first frame have 64 by 64 pixels, the others 67 million."""
    library: Any = cv2
    writer = library.VideoWriter(str(tmp_path / "a.avi"), library.VideoWriter_fourcc(*"MJPG"), 10, (64, 64))
    writer.write(np.zeros((64, 64, 3), np.uint8))
    writer.release()
    avi, jpeg = (tmp_path / "a.avi").read_bytes(), saved("image/jpeg", "RGB", 8190, {})
    place = avi.index(b"movi")
    end = avi.index(b"idx1", place)
    frame = b"00dc" + struct.pack("<I", len(jpeg)) + jpeg + bytes(len(jpeg) % 2)
    film = avi[: place - 4] + struct.pack("<I", end - place + 8 * len(frame)) + avi[place:end] + 8 * frame
    growth, decoding = peak_mib(tmp_path, "video/x-msvideo", film)
    assert growth < GROWTH_MIB_MAX
    assert decoding < DECODE_MIB_MAX
