"""Frame sampling of a video file, in a process of its own: `python -m worker.input.media.video_frames`.

FFmpeg allocates what each frame of the stream asks for, whatever the file's header says: 50 bytes may ask for
a gigabyte. It has no limit, so its process has one, and a crash of a decoder ends no worker.

Counts and rates of headers are only hints: browsers' recorders write none, and editors leave wrong ones. The
frames are found by the header's count; if some are missing or more follow, all are counted by decoding them.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from protocol import lifeline
from worker.input.media.images import within

FRAMES_A_SECOND = 2.0
"""Sampling rate; also assumed for videos that come as images without timestamps."""
FRAMES_MAX = 64
"""Maximum frames of one video; longer ones are sampled more sparsely."""
FRAMES_MIN = 4
FRAME_PIXELS_MAX = 2**20
"""Maximum pixels of a frame before the processor resizes it."""
PIXELS_MAX = 2**25
"""Maximum pixels of all frames of a video."""
SOURCE_PIXELS_MAX = 2**24
"""Maximum pixels of a frame in the file."""
MEMORY_BYTES_MAX = 3 * 2**27
"""Memory that decoding may take beside that of the libraries."""
_RATES = (1.0, 240.0)
"""Plausible frames per second; others are compared with the frames' times."""
_STEPS_MAX = 8
"""Frames that are read rather than sought over."""
_RATE = 25.0
"""Frames per second of a file that has neither a rate nor times."""

NO_FRAMES = "it has no frames that can be decoded"
TOO_LARGE = f"its frames are too large, at most {SOURCE_PIXELS_MAX} pixels are allowed"
TOO_MUCH_MEMORY = f"to decode it takes more than {MEMORY_BYTES_MAX // 2**20} MiB of memory"
FRAMES_FILE = "frames.rgb"


class VideoError(ValueError):
    """A video cannot be sampled. The message is meant for the client."""


def main() -> None:
    """Write the frames of FOLDER/video to FOLDER/frames.rgb; print their size, indices and rate as JSON."""
    lifeline.follow_parent()
    folder, pixels_max = Path(sys.argv[1]), int(sys.argv[2])
    import cv2

    used = psutil.Process().memory_info().vms
    if sys.platform == "linux":  # elsewhere, the worker alone watches it
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES_MAX,) * 2)
    try:
        frames, indices, fps = VideoFile(cv2, folder / "video").sample(pixels_max)
    except VideoError as error:
        print(json.dumps({"error": str(error)}))
    except (MemoryError, cv2.error):
        print(json.dumps({"error": TOO_MUCH_MEMORY}))
    else:
        with (folder / FRAMES_FILE).open("wb") as file:
            for frame in frames:
                file.write(frame.tobytes())
        print(json.dumps({"size": frames[0].size, "indices": indices, "fps": fps}))


class VideoFile:
    """A video file, opened by OpenCV with FFmpeg."""

    def __init__(self, library: Any, file: Path) -> None:
        self._library = library
        self._file = str(file)
        self._capture: Any = None
        self._open()

    def sample(self, pixels_max: int) -> tuple[list[Image.Image], list[int], float]:
        """Return frames of at most `pixels_max` pixels, their indices, and the file's frames per second."""
        total, fps = self._property("FRAME_COUNT"), self._property("FPS")
        if 0 < total < math.inf and _RATES[0] <= fps <= _RATES[1]:
            frames, indices = self._read(int(total), fps, pixels_max)
            if len(frames) == _count(int(total), fps) and not self._capture.grab():
                return frames, indices, fps
            del frames
        count, fps = self._measure(fps)
        frames, indices = self._read(count, fps, pixels_max)
        if not frames:
            raise VideoError(NO_FRAMES)
        return frames, indices, fps

    def _open(self) -> None:
        """Open the file, at its first frame."""
        # Each thread of a decoder has frames of its own.
        options = [self._library.CAP_PROP_N_THREADS, 1]
        self._capture = self._library.VideoCapture(self._file, self._library.CAP_FFMPEG, options)
        if not self._capture.isOpened():
            raise VideoError(NO_FRAMES)
        if self._property("FRAME_WIDTH") * self._property("FRAME_HEIGHT") > SOURCE_PIXELS_MAX:
            raise VideoError(TOO_LARGE)

    def _property(self, name: str) -> float:
        return float(self._capture.get(getattr(self._library, f"CAP_PROP_{name}")))

    def _measure(self, fps: float) -> tuple[int, float]:
        """Return the number of frames, counted by decoding them, and their rate by their times."""
        self._open()
        count, times = 0, [0.0, 0.0]
        while self._capture.grab():
            times[count > 0] = self._property("POS_MSEC")
            count += 1
        seconds = (times[1] - times[0]) / 1000
        if count > 1 and 0 < seconds < math.inf:
            return count, (count - 1) / seconds
        return count, fps if 0 < fps < math.inf else _RATE

    def _read(self, total: int, fps: float, pixels_max: int) -> tuple[list[Image.Image], list[int]]:
        """Read evenly spread frames, up to the first that is missing."""
        self._open()
        indices = spread(total, _count(total, fps))
        most = min(pixels_max, PIXELS_MAX // max(1, len(indices)))
        frames: list[Image.Image] = []
        place = 0
        for index in indices:
            # Seeking relies on the rate, so one that is unlikely is read without it.
            if index - place > _STEPS_MAX and _RATES[0] <= fps <= _RATES[1]:
                self._capture.set(self._library.CAP_PROP_POS_FRAMES, index)
                place = index
            while place < index and self._capture.grab():
                place += 1
            is_there, frame = self._capture.read()
            place += 1
            if not is_there:
                break
            pixels = self._library.cvtColor(frame, self._library.COLOR_BGR2RGB, dst=frame)
            image = within(Image.fromarray(pixels), most)
            size = frames[0].size if frames else image.size
            frames.append(image if image.size == size else image.resize(size))
        return frames, indices[: len(frames)]


def _count(total: int, fps: float) -> int:
    """Return the number of frames to sample: even (unless there is only one), as in upstream."""
    wanted = max(total / fps * FRAMES_A_SECOND, FRAMES_MIN)
    return max(1, min(int(wanted), FRAMES_MAX, total) // 2 * 2)


def spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spread indices below `total`, including the first and the last."""
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(min(count, total))]


if __name__ == "__main__":
    main()
