"""Multimodal models: mlx-vlm's network called like mlx-lm's, and rows with images.

Upstream embeds a prompt with all its images in one call. Here each image is embedded with its own tokens,
once. A chunk of a prompt, wherever its ends are, is assembled from these and text
embeddings. Upstream's networks remember the positions of the last prompt; here positions are passed in each
call, so no state leaks between rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from worker.runner.kv.batch import RowCaches
from worker.runner.kv.single import offset_of
from worker.values import ArrayBytes, EncodedImage, ImageInput

_ALIGNED = ("inputs_embeds", "per_layer_inputs")
"""Upstream's outputs for each token, [1, tokens, …]."""
PIXELS = ("pixel_values", "pixel_values_videos")
_GRIDS = ("image_grid_thw", "video_grid_thw")


class VisionNetwork(nn.Module):
    """mlx-vlm's network, called like mlx-lm's: `network(tokens, cache=…)` returns logits."""

    def __init__(self, whole: Any) -> None:
        """`whole`: a network with `language_model` and `get_input_embeddings`."""
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.whole = whole
        self.axes = 3 if hasattr(whole.language_model, "get_rope_index") else 0
        """Axes of the positions that are passed in: 3, 1, or 0 if the network computes positions itself."""

    @property
    def layers(self) -> Any:
        return self.whole.language_model.layers

    def make_cache(self) -> RowCaches:
        """Return empty caches of a row, one for each layer."""
        from worker.runner.kv.vlm_compat import twin  # text models start without mlx-vlm

        own = getattr(self.whole.language_model, "make_cache", None)
        return [twin(cache) for cache in own()] if own else [KVCache() for _ in self.layers]

    def __call__(
        self, tokens: mx.array, cache: RowCaches | None = None, shifts: mx.array | None = None, **inputs: Any
    ) -> mx.array:
        """Return logits, [rows, tokens, vocabulary]. `tokens`: [rows, tokens].

        `shifts`, [rows, 1] int32: offset of a row's positions from its number of tokens; an image takes fewer
        positions than tokens. `inputs`: embeddings that replace those of `tokens`.
        """
        if self.axes and "position_ids" not in inputs:
            positions = _positions(tokens, cache, shifts)
            inputs["position_ids"] = positions if self.axes == 3 else positions[0]
        elif not self.axes:
            self._forget_positions()
        logits: mx.array = self.whole.language_model(tokens, cache=cache, **inputs).logits
        return logits

    def _forget_positions(self) -> None:
        """Reset the positions of the last pass, from which some of upstream's networks continue."""
        if getattr(self.whole.language_model, "_position_ids", None) is not None:
            self.whole.language_model._position_ids = None

    def embed(self, tokens: Sequence[int], pixels: Mapping[str, mx.array]) -> Any:
        """Return upstream's embeddings of tokens and of the images among them."""
        ids = mx.array([list(tokens)], mx.int32)
        others = {name: array for name, array in pixels.items() if name != "pixel_values"}
        return self.whole.get_input_embeddings(
            ids, pixels.get("pixel_values"), mask=mx.ones_like(ids), **others
        )

    def positions(self, tokens: Sequence[int], grids: Mapping[str, mx.array]) -> tuple[mx.array | None, int]:
        """Return the positions of a prompt, [3, 1, tokens], and the shift of those behind it. None: one
        position per token."""
        if not self.axes:
            return None, 0
        ids = mx.array([list(tokens)], mx.int32)
        positions, shift = self.whole.language_model.get_rope_index(ids, **grids)
        return mx.broadcast_to(positions, (3, 1, len(tokens))), int(shift.item())


def _positions(tokens: mx.array, cache: RowCaches | None, shifts: mx.array | None) -> mx.array:
    """Return the positions of the next tokens, [3, rows, tokens]."""
    rows, count = tokens.shape
    offset = offset_of(cache or [])
    first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
    positions = mx.arange(count)[None] + first
    if shifts is not None:
        positions = positions + shifts
    return mx.broadcast_to(positions, (3, rows, count))


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """The embeddings of an image's tokens. `aligned`: arrays [1, tokens, …], by upstream's names. `deep`:
    [layers, image tokens, width], added after the first layers at the tokens in `mask`, [1, tokens] bool;
    None: not used."""

    aligned: Mapping[str, mx.array]
    mask: mx.array | None = None
    deep: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.aligned.values(), *(each for each in (self.mask, self.deep) if each is not None)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def part(self, first: int, last: int) -> ImageEmbedding:
        """Return the part for the tokens from `first` to before `last`."""
        aligned = {name: array[:, first:last] for name, array in self.aligned.items()}
        if self.deep is None or self.mask is None:
            return ImageEmbedding(aligned)
        marks = np.array(self.mask[0])
        before, within = int(marks[:first].sum()), int(marks[first:last].sum())
        return ImageEmbedding(aligned, self.mask[:, first:last], self.deep[:, before : before + within])


@dataclass(slots=True)
class ImagePrompt:
    """A prompt with images. `ids`: its tokens by their real ids; `at`: number of tokens run."""

    ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    positions: mx.array | None
    shift: int
    at: int = 0


class RowImages:
    """The images of the rows that have some."""

    def __init__(self, network: Any) -> None:
        """`network`: a `VisionNetwork`, or any network if no row will have images."""
        self._network = network
        self._shown: dict[str, ImagePrompt] = {}

    def encode(self, image: ImageInput) -> EncodedImage:
        """Encode an image, as `Engine.encode_image`."""
        pixels = {name: array_of(blob) for name, blob in image.inputs.items()}
        seen = _seen(self._network.embed(image.tokens, pixels))
        mx.eval(seen.arrays)
        return EncodedImage(seen, seen.nbytes)

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        ids = list(tokens)
        for image in images:
            ids[image.first : image.end] = image.tokens
        found = {name: [p.inputs[name] for p in images if name in p.inputs] for name in _GRIDS}
        grids = {
            name: mx.concatenate([array_of(blob) for blob in blobs]) for name, blobs in found.items() if blobs
        }
        # Behind the last image each token takes one position; generated tokens may look like image tokens but
        # are not.
        end = max((image.end for image in images), default=0)
        positions, shift = self._network.positions(ids[:end], grids)
        if positions is not None:
            behind = mx.arange(end, len(ids), dtype=positions.dtype) + shift
            behind = mx.broadcast_to(behind, (3, 1, len(ids) - end))
            positions = mx.concatenate([positions, behind], axis=2)
        self._shown[row] = ImagePrompt(tuple(ids), tuple(images), positions, shift)

    def has(self, row: str) -> bool:
        """Return whether a row has images."""
        return row in self._shown

    def skip(self, row: str, tokens: int) -> None:
        """Set the number of tokens that a restored row has run."""
        if row in self._shown:
            self._shown[row].at = tokens

    def copy(self, row: str, copy: str) -> None:
        """Copy the images and progress of `row` to the row `copy`."""
        if row in self._shown:
            old = self._shown[row]
            self._shown[copy] = ImagePrompt(old.ids, old.images, old.positions, old.shift, old.at)

    def drop(self, row: str) -> None:
        """Drop a row."""
        self._shown.pop(row, None)

    def clear(self) -> None:
        """Drop all rows."""
        self._shown.clear()

    def ids(self, row: str, tokens: Sequence[int]) -> Sequence[int]:
        """Return a row's tokens, with the real ids in place of image keys."""
        shown = self._shown.get(row)
        return tokens if shown is None else (*shown.ids, *tokens[len(shown.ids) :])

    def shift(self, row: str) -> int:
        """Return the shift of a row's positions; see `VisionNetwork.places`."""
        return self._shown[row].shift if row in self._shown else 0

    def prefill(
        self, row: str, tokens: int, caches: RowCaches, embeddings: Mapping[str, EncodedImage]
    ) -> None:
        """Run the next `tokens` tokens of a row with images, lazily. `embeddings`: of these, by digest."""
        shown = self._shown[row]
        first, last = shown.at, shown.at + tokens
        parts = self._parts(shown, first, last, embeddings)
        inputs: dict[str, Any] = {
            name: mx.concatenate([part.aligned[name] for part in parts], axis=1) for name in parts[0].aligned
        }
        if deep := [part.deep for part in parts if part.deep is not None]:
            inputs["visual_pos_masks"] = mx.concatenate([_mask_of(part) for part in parts], axis=1)
            inputs["deepstack_visual_embeds"] = mx.concatenate(deep, axis=1)
        if shown.positions is not None:
            inputs["position_ids"] = shown.positions[:, :, first:last]
        self._network(mx.array([shown.ids[first:last]], mx.int32), cache=caches, **inputs)
        shown.at = last

    def _parts(
        self, shown: ImagePrompt, first: int, last: int, embeddings: Mapping[str, EncodedImage]
    ) -> Sequence[ImageEmbedding]:
        """Return the embeddings of positions `first` to before `last`, in runs of text and image."""
        parts: list[ImageEmbedding] = []
        for image in shown.images:
            begin, end = max(first, image.first), min(last, image.end)
            if begin >= end:
                continue
            if first < begin:
                parts.append(self._text(shown.ids[first:begin]))
            encoded: Any = embeddings[image.digest].payload
            parts.append(encoded.part(begin - image.first, end - image.first))
            first = end
        if first < last:
            parts.append(self._text(shown.ids[first:last]))
        return parts

    def _text(self, ids: Sequence[int]) -> ImageEmbedding:
        return _seen(self._network.embed(ids, {}))


def array_of(blob: ArrayBytes) -> mx.array:
    """Convert a blob to an array on the device."""
    flat: Any = np.frombuffer(blob.data, _NUMPY_TYPES[blob.dtype])
    return mx.array(flat.reshape(blob.shape))


_NUMPY_TYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32,
}  # fmt: skip


def _seen(embedded: Any) -> ImageEmbedding:
    """Convert upstream's embedding output."""
    aligned = {name: array for name in _ALIGNED if (array := getattr(embedded, name, None)) is not None}
    deep = embedded.deepstack_visual_embeds
    if deep is None or embedded.visual_pos_masks is None:
        return ImageEmbedding(aligned)
    stacked = deep if isinstance(deep, mx.array) else mx.stack(list(deep))
    return ImageEmbedding(aligned, embedded.visual_pos_masks, stacked)


def _mask_of(part: ImageEmbedding) -> mx.array:
    """Return the image-token mask, [1, tokens] bool; all false for text."""
    if part.mask is not None:
        return part.mask
    return mx.zeros(part.aligned["inputs_embeds"].shape[:2], mx.bool_)
