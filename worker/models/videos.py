"""From the file of a video, or from images of it, to the frames that a model is shown."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from protocol.parts import Media
from protocol.wire import MEDIA_PIXELS_MAX
from worker.models.images import open_image, reading, unreadable, within

FRAMES_A_SECOND = 2.0
"""Of a video that is looked at; those that come as images without times are taken to be such."""
FRAMES_MAX = 64
"""Of one video: of a longer one they stand further apart."""
FRAMES_MIN = 4
FRAME_PIXELS_MAX = 2**20
"""Of a frame as it is kept until the processor makes it smaller."""


@dataclass(frozen=True, slots=True)
class Video:
    """`indices`: which of the source's frames these are, of which it has `fps` a second."""

    frames: Sequence[Image.Image]
    indices: Sequence[int]
    fps: float


def open_video(files: Sequence[bytes], media: Media) -> Video:
    """A file, or as many images, made one size. Raises `RequestError(invalid_media)`."""
    if media.mime.startswith("video/"):
        with reading(media):
            return _read(files[0], media)
    indices = _spread(len(files), min(len(files), FRAMES_MAX))
    frames = [within(open_image(files[index], media), FRAME_PIXELS_MAX) for index in indices]
    size = frames[0].size
    frames = [frame if frame.size == size else frame.resize(size) for frame in frames]
    return Video(frames, indices, FRAMES_A_SECOND)


def _read(data: bytes, media: Media) -> Video:
    import cv2  # imported by nobody who sees no videos

    library: Any = cv2
    with tempfile.NamedTemporaryFile(suffix=".video") as file:  # which is all that it reads from
        file.write(data)
        file.flush()
        capture = library.VideoCapture(file.name)
        try:
            return _sampled(library, capture, media)
        finally:
            capture.release()


def _sampled(library: Any, capture: Any, media: Media) -> Video:
    told = ("FRAME_COUNT", "FPS", "FRAME_WIDTH", "FRAME_HEIGHT")
    total, fps, width, height = (capture.get(getattr(library, f"CAP_PROP_{name}")) for name in told)
    if not capture.isOpened() or min(total, fps) <= 0 or not 0 < width * height <= MEDIA_PIXELS_MAX:
        raise unreadable(media, "it has no frames, or too large ones")
    frames, indices = [], []
    for index in _spread(int(total), _count(int(total), fps)):
        capture.set(library.CAP_PROP_POS_FRAMES, index)
        is_there, frame = capture.read()
        if not is_there:
            break
        pixels = library.cvtColor(frame, library.COLOR_BGR2RGB)
        frames.append(within(Image.fromarray(pixels), media.pixels_max or FRAME_PIXELS_MAX))
        indices.append(index)
    if not frames:
        raise unreadable(media, "none of its frames can be decoded")
    return Video(frames, indices, fps)


def _count(total: int, fps: float) -> int:
    """How many frames are looked at: an even number where there are two, as upstream counts."""
    wanted = max(total / fps * FRAMES_A_SECOND, FRAMES_MIN)
    return max(1, min(int(wanted), FRAMES_MAX, total) // 2 * 2)


def _spread(total: int, count: int) -> list[int]:
    """So many of `total` places, from the first to the last."""
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]
