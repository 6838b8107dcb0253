"""Upstream's image processor, called for one image at a time on threads that must not touch MLX.

A processor of mlx-vlm does three things in one call: it resizes images into arrays, expands placeholders in a
prompt's text, and tokenizes. Here its tokenizer is replaced by one that returns the expanded text, so that we
tokenize it, once. These processors also create MLX arrays (`to_mlx`), and InternVL's computes with
`mx`; in their modules these are replaced by numpy, which upstream's own callers accept as well. A processor
that uses MLX in other ways fails when its model is loaded, not with a request.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn
import numpy as np
from PIL import Image

from worker.input.locks import acquired
from worker.input.media.videos import Video
from worker.values import ArrayBytes

_WRITTEN = "written"
_NAMES = {
    np.dtype(np.bool_): "BOOL", np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32",
}  # fmt: skip
TEXTUAL = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", _WRITTEN})


@dataclass(frozen=True, slots=True)
class Processed:
    """Output of upstream's processor: the text with expanded placeholders, and the encoder's inputs."""

    text: str
    inputs: Mapping[str, ArrayBytes]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.text) + sum(memoryview(blob.data).nbytes for blob in self.inputs.values())


class Processor:
    """Wraps upstream's processor. Thread-safe, because calls leave no state behind (but see `tokenize`)."""

    def __init__(self, upstreams: Any) -> None:
        """`upstreams`: a processor of mlx-vlm, owned by this object from now on. Raises `ValueError` for one
        that is built differently."""
        if getattr(upstreams, "image_processor", None) is None:
            raise ValueError("its processor accepts no images")
        for part in (upstreams, upstreams.image_processor, getattr(upstreams, "video_processor", None)):
            for kind in type(part).__mro__:
                _keep_from_mlx(sys.modules[kind.__module__])
        self._tokenizer = upstreams.tokenizer
        upstreams.tokenizer = TextCapture(self._tokenizer)
        self._upstreams = upstreams

    @property
    def marks(self) -> list[str]:
        """Texts that it may interpret as an image, the likeliest first."""
        names = ("image_token", "boi_token")
        told = [getattr(self._upstreams, name, None) for name in names]
        return [mark for mark in (*told, "<image>", "<|image|>") if isinstance(mark, str) and mark]

    @property
    def has_videos(self) -> bool:
        """Whether it has a video processor."""
        return getattr(self._upstreams, "video_processor", None) is not None

    def see(self, text: str, images: Sequence[Image.Image]) -> Processed:
        """Process a text with one placeholder per image. Raises what upstream raises."""
        return _processed(self._upstreams(text=[text], images=list(images)))

    def tokenize(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        """Return all outputs for a prompt with upstream's own tokenizer: numpy arrays and lists of them. Only
        for the model thread while no other thread uses the processor: it may compute with MLX."""
        writer, self._upstreams.tokenizer = self._upstreams.tokenizer, self._tokenizer
        try:
            said = self._upstreams(text=[text], images=list(images))
        finally:
            self._upstreams.tokenizer = writer
        arrays = {name: value for name, value in said.items() if hasattr(value, "__len__")}
        return {name: each if isinstance(each, list) else np.asarray(each) for name, each in arrays.items()}

    def watch(self, placeholder: str, video: Video) -> Processed:
        """Process a video. Raises what upstream raises."""
        frames = np.stack([np.asarray(frame).transpose(2, 0, 1) for frame in video.frames])
        told = {"frames_indices": list(video.indices), "fps": video.fps}
        return _processed(self._upstreams(text=[placeholder], videos=[frames], video_metadata=[told]))


class TextCapture:
    """Replaces a tokenizer: returns the text instead of its tokens, and delegates everything else."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: Any, **options: Any) -> dict[str, Any]:
        written = text if isinstance(text, str) else text[0]
        return {"input_ids": [[0]], "attention_mask": [[1]], _WRITTEN: written}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class LazyProcessor:
    """The processor of a folder, opened by the first call, on any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._opened: Processor | None = None

    def __call__(self) -> Processor:
        """Raises whatever upstream raises, or `TimeoutError` if another thread takes too long to open it."""
        with acquired(self._lock, "the processor"):
            self._opened = self._opened or load_processor(self._folder)
            return self._opened


def load_processor(folder: Path) -> Processor:
    """Load the processor of a folder whose network upstream has loaded. Raises whatever upstream raises."""
    from mlx_vlm.utils import load_processor as load

    return Processor(load(folder, add_detokenizer=False))


def _processed(said: Mapping[str, Any]) -> Processed:
    inputs = {}
    for name, value in said.items():
        if name in TEXTUAL or value is None or np.ndim(value) == 0:
            continue
        array: Any = np.ascontiguousarray(value)
        if array.dtype not in _NAMES:
            raise ValueError(f"{name} has the unsupported dtype {array.dtype}")
        inputs[name] = ArrayBytes(_NAMES[array.dtype], array.shape, memoryview(array).cast("B"))
    return Processed(str(said[_WRITTEN]), inputs)


# --- numpy in place of MLX ---


def _keep_from_mlx(module: ModuleType) -> None:
    if not module.__name__.startswith("mlx_vlm."):
        return
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    if hasattr(module, "mx") and any(issubclass(each, nn.Module) for each in classes):
        raise ValueError(f"{module.__name__} contains both a processor and a network")
    for name, ours in (("to_mlx", _arrays), ("mx", _Numpy)):
        if hasattr(module, name):
            setattr(module, name, ours)


def _arrays(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replacement of `mlx_vlm.models.base.to_mlx`: regular lists become numpy arrays."""
    made = {}
    for name, value in data.items():
        made[name] = value
        if isinstance(value, list | tuple | np.ndarray) and name != _WRITTEN:
            try:
                made[name] = _single(np.array(value))
            except ValueError:
                continue
    return made


def _single(array: np.ndarray) -> np.ndarray:
    """Convert float64 to float32, as MLX does."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


class _Arrays(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, np.ndarray)


class _Array(metaclass=_Arrays):
    def __new__(cls, value: Any, dtype: Any = None) -> Any:
        return _single(np.array(value, dtype))


class _Numpy:
    """The functions of `mlx.core` that processors use; any other fails."""

    array = _Array
    stack = staticmethod(np.stack)
    concatenate = staticmethod(np.concatenate)
    expand_dims = staticmethod(np.expand_dims)
    float32, int32, int64 = np.float32, np.int32, np.int64
