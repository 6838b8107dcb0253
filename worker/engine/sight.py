"""A model that sees: mlx-vlm's network as the engine calls every network, and what is kept of images.

Upstream puts a prompt's images into its embeddings in one call, over the whole prompt. Here each image is put
into the embeddings of its own tokens, once, and kept under its digest; a chunk of a prompt is then laid
together of such and of plain text, wherever it is cut. Upstream's networks keep positions of the last prompt
in themselves; here they are told each time, so nothing of one row is left for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.pictures import Blob, Picture

_ALIGNED = ("inputs_embeds", "per_layer_inputs")
"""What upstream gives out for each token, [1, tokens, …]."""
PIXELS = ("pixel_values", "pixel_values_videos")
_GRIDS = ("image_grid_thw", "video_grid_thw")


class VisionNetwork(nn.Module):
    """mlx-vlm's network, called like mlx-lm's: `network(tokens, cache=…)` gives logits."""

    def __init__(self, whole: Any) -> None:
        """`whole`: a network with `language_model` and `get_input_embeddings`."""
        initialize: Any = super().__init__  # which MLX leaves without types
        initialize()
        self.whole = whole
        self.axes = 3 if hasattr(whole.language_model, "get_rope_index") else 0
        """Of the positions of its tokens that it is told: three, one, or 0: it finds them itself."""

    @property
    def layers(self) -> Any:
        return self.whole.language_model.layers

    def make_cache(self) -> RowCaches:
        """Empty caches of a row, one for each layer."""
        from worker.engine.caches.twins import twin  # models of text start without mlx-vlm

        own = getattr(self.whole.language_model, "make_cache", None)
        return [twin(cache) for cache in own()] if own else [KVCache() for _ in self.layers]

    def __call__(
        self, tokens: mx.array, cache: RowCaches | None = None, shifts: mx.array | None = None, **inputs: Any
    ) -> mx.array:
        """Logits, [rows, tokens, vocabulary]. `tokens` is [rows, tokens].

        `shifts`, [rows, 1] int32: how far a row's positions are behind its number of tokens, since an image
        takes fewer positions than tokens. `inputs`: what takes the place of embedded tokens.
        """
        if self.axes and "position_ids" not in inputs:
            positions = _positions(tokens, cache, shifts)
            inputs["position_ids"] = positions if self.axes == 3 else positions[0]
        elif not self.axes:
            self._forget_positions()
        logits: mx.array = self.whole.language_model(tokens, cache=cache, **inputs).logits
        return logits

    def _forget_positions(self) -> None:
        """Of what was run last, which some of upstream's keep for what they take to follow it."""
        if getattr(self.whole.language_model, "_position_ids", None) is not None:
            self.whole.language_model._position_ids = None

    def embed(self, tokens: Sequence[int], pixels: Mapping[str, mx.array]) -> Any:
        """Upstream's own embeddings of tokens and the images that stand there."""
        ids = mx.array([list(tokens)], mx.int32)
        others = {name: array for name, array in pixels.items() if name != "pixel_values"}
        return self.whole.get_input_embeddings(
            ids, pixels.get("pixel_values"), mask=mx.ones_like(ids), **others
        )

    def places(self, tokens: Sequence[int], grids: Mapping[str, mx.array]) -> tuple[mx.array | None, int]:
        """The positions of a whole prompt, [3, 1, tokens], and how far those of what follows are shifted.
        None: it has one position for each token."""
        if not self.axes:
            return None, 0
        ids = mx.array([list(tokens)], mx.int32)
        positions, shift = self.whole.language_model.get_rope_index(ids, **grids)
        return mx.broadcast_to(positions, (3, 1, len(tokens))), int(shift.item())


def _positions(tokens: mx.array, cache: RowCaches | None, shifts: mx.array | None) -> mx.array:
    """[3, rows, tokens]: those behind what the caches hold."""
    rows, count = tokens.shape
    offset: Any = next((c.offset for c in leaf_caches(cache or []) if hasattr(c, "update_and_fetch")), 0)
    first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
    positions = mx.arange(count)[None] + first
    if shifts is not None:
        positions = positions + shifts
    return mx.broadcast_to(positions, (3, rows, count))


@dataclass(frozen=True, slots=True)
class Seen:
    """An image in the embeddings of its tokens. `aligned`: arrays [1, tokens, …], by upstream's names for
    them. `deep`: [layers, image tokens, width], added behind the first layers at the tokens of `mask`,
    [1, tokens] bool; None: nothing is."""

    aligned: Mapping[str, mx.array]
    mask: mx.array | None = None
    deep: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.aligned.values(), *(each for each in (self.mask, self.deep) if each is not None)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def part(self, first: int, last: int) -> Seen:
        """Of the tokens from `first` to before `last`."""
        aligned = {name: array[:, first:last] for name, array in self.aligned.items()}
        if self.deep is None or self.mask is None:
            return Seen(aligned)
        marks = np.array(self.mask[0])
        before, within = int(marks[:first].sum()), int(marks[first:last].sum())
        return Seen(aligned, self.mask[:, first:last], self.deep[:, before : before + within])


@dataclass(slots=True)
class Shown:
    """A row with images. `ids`: its tokens by their real numbers; `at`: so many of them have been run."""

    ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    positions: mx.array | None
    shift: int
    at: int = 0


class Sight:
    """What is kept of images, and which rows have them."""

    def __init__(self, network: Any) -> None:
        """`network`: a `VisionNetwork`; any other, if no row will have images."""
        self._network = network
        self._kept: dict[str, Seen] = {}
        self._shown: dict[str, Shown] = {}

    # --- images ---

    def look(self, picture: Picture) -> int:
        """See `contract.Engine`."""
        if picture.digest not in self._kept:
            pixels = {name: array_of(blob) for name, blob in picture.inputs.items()}
            seen = _seen(self._network.embed(picture.tokens, pixels))
            mx.eval(seen.arrays)
            self._kept[picture.digest] = seen
        return self._kept[picture.digest].nbytes

    def forget(self, digest: str) -> None:
        """See `contract.Engine`."""
        self._kept.pop(digest, None)

    # --- rows ---

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        """See `contract.Engine`."""
        ids = list(tokens)
        for picture in pictures:
            ids[picture.first : picture.end] = picture.tokens
        found = {name: [p.inputs[name] for p in pictures if name in p.inputs] for name in _GRIDS}
        grids = {
            name: mx.concatenate([array_of(blob) for blob in blobs]) for name, blobs in found.items() if blobs
        }
        # Behind the last image a token is a position; what an answer has may look like an image and is none.
        end = max((picture.end for picture in pictures), default=0)
        positions, shift = self._network.places(ids[:end], grids)
        if positions is not None:
            behind = mx.arange(end, len(ids), dtype=positions.dtype) + shift
            behind = mx.broadcast_to(behind, (3, 1, len(ids) - end))
            positions = mx.concatenate([positions, behind], axis=2)
        self._shown[row] = Shown(tuple(ids), tuple(pictures), positions, shift)

    def has(self, row: str) -> bool:
        """Whether a row was shown images."""
        return row in self._shown

    def skip(self, row: str, tokens: int) -> None:
        """A row has been restored up to there."""
        if row in self._shown:
            self._shown[row].at = tokens

    def copy(self, row: str, copy: str) -> None:
        """A row that begins as another stands."""
        if row in self._shown:
            old = self._shown[row]
            self._shown[copy] = Shown(old.ids, old.pictures, old.positions, old.shift, old.at)

    def drop(self, row: str) -> None:
        """Forget a row, not its images."""
        self._shown.pop(row, None)

    def clear(self) -> None:
        """Forget all rows."""
        self._shown.clear()

    def ids(self, row: str, tokens: Sequence[int]) -> Sequence[int]:
        """A row's tokens without keys of images."""
        shown = self._shown.get(row)
        return tokens if shown is None else (*shown.ids, *tokens[len(shown.ids) :])

    def shift(self, row: str) -> int:
        """See `VisionNetwork.places`."""
        return self._shown[row].shift if row in self._shown else 0

    def prefill(self, row: str, tokens: int, caches: RowCaches) -> None:
        """Run so many tokens of a shown row, lazily."""
        shown = self._shown[row]
        first, last = shown.at, shown.at + tokens
        parts = list(self._parts(shown, first, last))
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

    def _parts(self, shown: Shown, first: int, last: int) -> Sequence[Seen]:
        """What stands at the positions from `first` to before `last`, run by run."""
        parts: list[Seen] = []
        for picture in shown.pictures:
            begin, end = max(first, picture.first), min(last, picture.end)
            if begin >= end:
                continue
            if first < begin:
                parts.append(self._text(shown.ids[first:begin]))
            parts.append(self._kept[picture.digest].part(begin - picture.first, end - picture.first))
            first = end
        if first < last:
            parts.append(self._text(shown.ids[first:last]))
        return parts

    def _text(self, ids: Sequence[int]) -> Seen:
        return _seen(self._network.embed(ids, {}))


def array_of(blob: Blob) -> mx.array:
    """A blob as an array on the device."""
    flat: Any = np.frombuffer(blob.data, _NUMPY_TYPES[blob.dtype])
    return mx.array(flat.reshape(blob.shape))


_NUMPY_TYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32,
}  # fmt: skip


def _seen(embedded: Any) -> Seen:
    """What a network has made of tokens and images."""
    aligned = {name: array for name in _ALIGNED if (array := getattr(embedded, name, None)) is not None}
    deep = embedded.deepstack_visual_embeds
    if deep is None or embedded.visual_pos_masks is None:
        return Seen(aligned)
    stacked = deep if isinstance(deep, mx.array) else mx.stack(list(deep))
    return Seen(aligned, embedded.visual_pos_masks, stacked)


def _mask_of(part: Seen) -> mx.array:
    """[1, tokens] bool: none, where it is text."""
    if part.mask is not None:
        return part.mask
    return mx.zeros(part.aligned["inputs_embeds"].shape[:2], mx.bool_)
