"""Upstream's processor, asked of one image at a time, on threads that must not touch MLX.

A processor of mlx-vlm does three things in one call: it resizes images into arrays, writes in a prompt's text
what stands for each, and tokenizes. Here its tokenizer is one that hands the written text back instead, so
that text is tokenized once and by us. In the end these processors make MLX arrays (`to_mlx`), and InternVL's
computes with `mx`; their modules are given numpy in place of these, which upstream's own callers take as
well. A processor that computes with MLX in another way fails when its model is loaded, not with a request.
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

from worker.models.videos import Video
from worker.pictures import Blob

_WRITTEN = "written"
_NAMES = {
    np.dtype(np.bool_): "BOOL", np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32",
}  # fmt: skip
TEXTUAL = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", _WRITTEN})


@dataclass(frozen=True, slots=True)
class Processed:
    """What upstream makes of a text with images: what it writes for it, and what the encoder takes."""

    text: str
    inputs: Mapping[str, Blob]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.text) + sum(memoryview(blob.data).nbytes for blob in self.inputs.values())


class Processor:
    """Used by all threads of the pool: a call leaves nothing behind in it."""

    def __init__(self, upstreams: Any) -> None:
        """`upstreams`: a processor of mlx-vlm's, which nobody else uses from now on.

        Raises `ValueError` for one that is made in another way than the others."""
        if getattr(upstreams, "image_processor", None) is None:
            raise ValueError("its processor takes no images")
        for part in (upstreams, upstreams.image_processor, getattr(upstreams, "video_processor", None)):
            for kind in type(part).__mro__:
                _keep_from_mlx(sys.modules[kind.__module__])
        self._tokenizer = upstreams.tokenizer
        upstreams.tokenizer = Writer(self._tokenizer)
        self._upstreams = upstreams

    @property
    def marks(self) -> list[str]:
        """The texts that it may take for an image, the likeliest first."""
        names = ("image_token", "boi_token")
        told = [getattr(self._upstreams, name, None) for name in names]
        return [mark for mark in (*told, "<image>", "<|image|>") if isinstance(mark, str) and mark]

    @property
    def has_videos(self) -> bool:
        """Whether it may take videos as such."""
        return getattr(self._upstreams, "video_processor", None) is not None

    def see(self, text: str, images: Sequence[Image.Image]) -> Processed:
        """A text with a placeholder for each image. Raises what upstream raises."""
        return _processed(self._upstreams(text=[text], images=list(images)))

    def tokenize(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        """All that upstream makes of a prompt, by its own tokenizer: numpy arrays and lists of them. For the
        model thread, and while no other is at it: it may compute with MLX."""
        writer, self._upstreams.tokenizer = self._upstreams.tokenizer, self._tokenizer
        try:
            said = self._upstreams(text=[text], images=list(images))
        finally:
            self._upstreams.tokenizer = writer
        arrays = {name: value for name, value in said.items() if hasattr(value, "__len__")}
        return {name: each if isinstance(each, list) else np.asarray(each) for name, each in arrays.items()}

    def watch(self, placeholder: str, video: Video) -> Processed:
        """Raises what upstream raises."""
        frames = np.stack([np.asarray(frame).transpose(2, 0, 1) for frame in video.frames])
        told = {"frames_indices": list(video.indices), "fps": video.fps}
        return _processed(self._upstreams(text=[placeholder], videos=[frames], video_metadata=[told]))


class Writer:
    """In place of a tokenizer: what it is asked to tokenize, it hands back. All else is the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: Any, **options: Any) -> dict[str, Any]:
        written = text if isinstance(text, str) else text[0]
        return {"input_ids": [[0]], "attention_mask": [[1]], _WRITTEN: written}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Opening:
    """The processor of a folder, opened when it is first asked for, by whatever thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._opened: Processor | None = None

    def __call__(self) -> Processor:
        """Raises one of many errors."""
        with self._lock:
            self._opened = self._opened or load_processor(self._folder)
            return self._opened


def load_processor(folder: Path) -> Processor:
    """The processor in a folder whose network upstream has loaded. Raises one of many errors."""
    from mlx_vlm.utils import load_processor as load

    return Processor(load(folder, add_detokenizer=False))


def _processed(said: Mapping[str, Any]) -> Processed:
    inputs = {}
    for name, value in said.items():
        if name in TEXTUAL or value is None or np.ndim(value) == 0:
            continue
        array: Any = np.ascontiguousarray(value)
        if array.dtype not in _NAMES:
            raise ValueError(f"{name} is made of {array.dtype}")
        inputs[name] = Blob(_NAMES[array.dtype], array.shape, memoryview(array).cast("B"))
    return Processed(str(said[_WRITTEN]), inputs)


# --- numpy in place of MLX ---


def _keep_from_mlx(module: ModuleType) -> None:
    if not module.__name__.startswith("mlx_vlm."):
        return
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    if hasattr(module, "mx") and any(issubclass(each, nn.Module) for each in classes):
        raise ValueError(f"{module.__name__} has both a processor and a network")
    for name, ours in (("to_mlx", _arrays), ("mx", _Numpy)):
        if hasattr(module, name):
            setattr(module, name, ours)


def _arrays(data: Mapping[str, Any]) -> dict[str, Any]:
    """As `mlx_vlm.models.base.to_mlx`: lists become arrays where they are regular."""
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
    """MLX makes float32 of float64, and so do we."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


class _Arrays(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, np.ndarray)


class _Array(metaclass=_Arrays):
    def __new__(cls, value: Any, dtype: Any = None) -> Any:
        return _single(np.array(value, dtype))


class _Numpy:
    """What processors use of `mlx.core`; anything else fails."""

    array = _Array
    stack = staticmethod(np.stack)
    concatenate = staticmethod(np.concatenate)
    expand_dims = staticmethod(np.expand_dims)
    float32, int32, int64 = np.float32, np.int32, np.int64
