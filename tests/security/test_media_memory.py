"""The highest memory of decoding: images at the limits of their formats, and videos that lie about theirs."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from protocol.errors import RequestError
from protocol.types import Media
from worker.input.media.images import open_image

GROWTH_MIB_MAX = 400
"""What docs/security.md promises for an image, and a margin for what libraries keep."""
DECODE_MIB_MAX = 650
"""Of the process that decodes a video: its limit, and the libraries."""
PROGRAM = """
import resource, sys
from protocol.types import Media
from worker.input.media.images import open_image
from worker.input.media.videos import open_video
data, media = open(sys.argv[2], "rb").read(), Media(frame=0, mime=sys.argv[1], sha256="")
def peak(of):
    return resource.getrusage(of).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
before = peak(resource.RUSAGE_SELF)
open_video([data], media) if "video" in media.mime else open_image(data, media)
print(peak(resource.RUSAGE_SELF) - before, peak(resource.RUSAGE_CHILDREN))
"""
LARGEST: list[tuple[str, str, int, dict[str, Any]]] = [
    ("PNG", "RGBA", 8190, {"compress_level": 1}), ("JPEG", "RGB", 8190, {}), ("GIF", "P", 8190, {}),
    ("JPEG", "RGB", 6670, {"progressive": True, "subsampling": 0}),
    ("JPEG", "CMYK", 5780, {"progressive": True, "subsampling": 0}),
    ("WEBP", "RGBA", 4096, {"lossless": True, "method": 0}), ("BMP", "1", 8190, {}),
]  # fmt: skip


def peak_mib(file: Path, mime: str) -> list[int]:
    """Return the growth of a process that decodes, and the highest memory of its children."""
    program = [sys.executable, "-c", PROGRAM, mime, str(file)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize(("kind", "mode", "side", "options"), LARGEST)
def test_the_largest_image_of_each_format_stays_within_the_promise(
    kind: str, mode: str, side: int, options: dict[str, Any], tmp_path: Path
) -> None:
    for name, width in (("largest", side), ("larger", side + 30)):
        Image.new(mode, (width, width)).save(tmp_path / name, kind, **options)
    mime = f"image/{kind.lower()}"
    assert peak_mib(tmp_path / "largest", mime)[0] < GROWTH_MIB_MAX
    with pytest.raises(RequestError, match=r"more than 67108864 pixels|too much memory"):
        open_image((tmp_path / "larger").read_bytes(), Media(frame=0, mime=mime, sha256=""))


def test_a_video_whose_frames_grow_is_decoded_within_a_limit(tmp_path: Path) -> None:
    """The header and the first frame have 64 by 64 pixels, the others 67 million."""
    library: Any = cv2
    writer = library.VideoWriter(str(tmp_path / "a.avi"), library.VideoWriter_fourcc(*"MJPG"), 10, (64, 64))
    writer.write(np.zeros((64, 64, 3), np.uint8))
    writer.release()
    Image.new("RGB", (8190, 8190)).save(tmp_path / "a.jpg", quality=50)
    avi, jpeg = (tmp_path / "a.avi").read_bytes(), (tmp_path / "a.jpg").read_bytes()
    place, end = avi.index(b"movi"), avi.index(b"idx1")
    frames = 8 * (b"00dc" + struct.pack("<I", len(jpeg)) + jpeg + bytes(len(jpeg) % 2))
    movie = struct.pack("<I", end - place + len(frames)) + avi[place:end] + frames
    (tmp_path / "a.avi").write_bytes(avi[: place - 4] + movie)
    growth, decoding = peak_mib(tmp_path / "a.avi", "video/x-msvideo")
    assert growth < GROWTH_MIB_MAX
    assert decoding < DECODE_MIB_MAX
