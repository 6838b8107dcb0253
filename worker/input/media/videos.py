"""Decode videos: sample frames from a file, or take a list of images as frames."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from protocol import lifeline
from protocol.common.temporary_folder import TemporaryFolder
from protocol.types import Media
from worker.input.media import video_frames
from worker.input.media.images import DAMAGED, PixelBudget, open_image, reading, unreadable, within
from worker.input.media.video_frames import (
    FRAME_PIXELS_MAX,
    FRAMES_A_SECOND,
    FRAMES_FILE,
    FRAMES_MAX,
    MEMORY_BYTES_MAX,
    PIXELS_MAX,
    TOO_MUCH_MEMORY,
    spread,
)
from worker.values import NEVER, CancelToken

DECODE_S_MAX = 60.0
"""Time to decode a video file."""
_POLL_S = 0.02
_REST_BYTES = 2**27
"""Memory of the libraries in the process that decodes a file, about."""


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames. `indices`: their indices in the source. `fps`: the source's frames per second."""

    frames: Sequence[Image.Image]
    indices: Sequence[int]
    fps: float


def open_video(
    files: Sequence[bytes],
    media: Media,
    cancel_token: CancelToken = NEVER,
    budget: PixelBudget | None = None,
) -> Video:
    """Open a video file, or images that are resized to one size. `budget`: for these images. Raises
    `RequestError(invalid_media)`, and `PreparationCancelled` after a cancellation."""
    if media.mime.startswith("video/"):
        with reading(media, DAMAGED):
            return _read(files[0], media, cancel_token)
    indices = spread(len(files), min(len(files), FRAMES_MAX))
    most = min(FRAME_PIXELS_MAX, PIXELS_MAX // len(indices))
    frames = []
    for index in indices:
        cancel_token.check()
        frames.append(within(open_image(files[index], media, budget), most))
    size = frames[0].size
    frames = [frame if frame.size == size else frame.resize(size) for frame in frames]
    return Video(frames, indices, FRAMES_A_SECOND)


def _read(data: bytes, media: Media, cancel_token: CancelToken) -> Video:
    with TemporaryFolder("video") as folder:  # OpenCV reads only from files
        (folder / "video").write_bytes(data)
        sampled = _sampled(folder, media, cancel_token)
        if "error" in sampled:
            raise unreadable(media, sampled["error"])
        width, height = sampled["size"]
        with (folder / FRAMES_FILE).open("rb") as file:
            pixels = (file.read(3 * width * height) for _ in sampled["indices"])
            frames = [Image.frombytes("RGB", (width, height), each) for each in pixels]
        return Video(frames, sampled["indices"], sampled["fps"])


def _sampled(folder: Path, media: Media, cancel_token: CancelToken) -> dict[str, Any]:
    """Return what a process of its own prints about the frames that it samples."""
    pixels_max = str(media.pixels_max or FRAME_PIXELS_MAX)
    # It imports what this process would, and ends with it, since its stdin does.
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), lifeline.VARIABLE: "0"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", video_frames.__name__, folder, pixels_max],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            if not _ends_within_limits(process, media, cancel_token):
                raise unreadable(media, TOO_MUCH_MEMORY)
        finally:
            process.kill()
        assert process.stdout is not None
        sampled: dict[str, Any] = json.loads(process.stdout.read())
        return sampled


def _ends_within_limits(process: subprocess.Popen[bytes], media: Media, cancel_token: CancelToken) -> bool:
    """Wait until a process ends; return False if it has too much memory. Raises `RequestError` after
    `DECODE_S_MAX`, and `PreparationCancelled`."""
    until = time.monotonic() + DECODE_S_MAX
    while process.poll() is None:
        cancel_token.check()
        if time.monotonic() > until:
            raise unreadable(media, f"to decode it takes more than {DECODE_S_MAX:.0f} seconds")
        with contextlib.suppress(psutil.Error):  # it has just ended
            if psutil.Process(process.pid).memory_info().rss > MEMORY_BYTES_MAX + _REST_BYTES:
                return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return True
