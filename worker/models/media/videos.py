"""Decode videos: sample frames from a file, or take a list of images as frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from protocol.temporary_folder import TemporaryFolder
from protocol.types import Media
from protocol.wire import MEDIA_PIXELS_MAX
from worker.contract.preparation import NEVER, CancelToken
from worker.models.media.images import DAMAGED, open_image, reading, unreadable, within

FRAMES_A_SECOND = 2.0
"""Sampling rate; also assumed for videos that come as images without timestamps."""
FRAMES_MAX = 64
"""Maximum frames of one video; longer ones are sampled more sparsely."""
FRAMES_MIN = 4
FRAME_PIXELS_MAX = 2**20
"""Maximum pixels of a frame before the processor resizes it."""


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames. `indices`: their indices in the source. `fps`: the source's frames per second."""

    frames: Sequence[Image.Image]
    indices: Sequence[int]
    fps: float


def open_video(files: Sequence[bytes], media: Media, cancel_token: CancelToken = NEVER) -> Video:
    """Open a video file, or images that are resized to one size. Raises `RequestError(invalid_media)`, and
    `PreparationCancelled` after a cancellation, which is checked before each frame."""
    if media.mime.startswith("video/"):
        with reading(media, DAMAGED):
            return _read(files[0], media, cancel_token)
    indices = _spread(len(files), min(len(files), FRAMES_MAX))
    frames = []
    for index in indices:
        cancel_token.check()
        frames.append(within(open_image(files[index], media), FRAME_PIXELS_MAX))
    size = frames[0].size
    frames = [frame if frame.size == size else frame.resize(size) for frame in frames]
    return Video(frames, indices, FRAMES_A_SECOND)


def _read(data: bytes, media: Media, cancel_token: CancelToken) -> Video:
    import cv2  # slow import, needed for videos only

    library: Any = cv2
    with TemporaryFolder("video") as folder:  # OpenCV reads only from files
        file = folder / "frames.video"
        file.write_bytes(data)
        capture = library.VideoCapture(str(file))
        try:
            return _sampled(library, capture, media, cancel_token)
        finally:
            capture.release()


def _sampled(library: Any, capture: Any, media: Media, cancel_token: CancelToken) -> Video:
    told = ("FRAME_COUNT", "FPS", "FRAME_WIDTH", "FRAME_HEIGHT")
    total, fps, width, height = (capture.get(getattr(library, f"CAP_PROP_{name}")) for name in told)
    if not capture.isOpened() or min(total, fps) <= 0 or not 0 < width * height <= MEDIA_PIXELS_MAX:
        raise unreadable(media, "it has no frames, or they are too large")
    frames, indices = [], []
    for index in _spread(int(total), _count(int(total), fps)):
        cancel_token.check()
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
    """Return the number of frames to sample: even (unless there is only one), as in upstream."""
    wanted = max(total / fps * FRAMES_A_SECOND, FRAMES_MIN)
    return max(1, min(int(wanted), FRAMES_MAX, total) // 2 * 2)


def _spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spread indices below `total`, including the first and the last."""
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]
