"""Batches of dialogues of similar length, to minimize padding; images as patches in Qwen's layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.pocket.dialogue import Image, encode
from recipes.pocket.synthesize import Phase, draw_dialogue
from recipes.pocket.tokenizer import text_pieces

PATCH, MERGE, FRAMES = 16, 2, 2
_POOL_TOKENS = 80_000


@dataclass
class Batch:
    ids: torch.Tensor
    learnt: torch.Tensor
    """Shape (2, n): row and column of each token in the loss."""
    pixels: torch.Tensor | None
    grids: torch.Tensor | None


@dataclass
class _Example:
    ids: list[int]
    learnt: list[bool]
    images: list[Image]


def patches(image: Image) -> np.ndarray:
    """Return rows of one patch each, in the order of Qwen's image processor: by the 2 × 2 blocks that are
    merged."""
    rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
    scaled = image.astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    frames = np.repeat(scaled[None], FRAMES, axis=0)
    cut = frames.reshape(FRAMES, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    ordered = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    flat: np.ndarray = ordered.reshape(rows * columns, 3 * FRAMES * PATCH * PATCH)
    return flat


def vision_inputs(images: list[Image]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.from_numpy(np.concatenate([patches(image) for image in images]))
    grids = [(1, image.shape[0] // PATCH, image.shape[1] // PATCH) for image in images]
    return pixels, torch.tensor(grids)


def stream(tokenizer: Any, phase: Phase, batch_tokens: int, longest: int, seed: str) -> Iterator[Batch]:
    """Yield batches without end: a pool is drawn, sorted by length, split into batches, and these are
    shuffled."""
    pools = 0
    pieces = text_pieces(tokenizer)
    while True:
        pool: list[_Example] = []
        tokens = 0
        while tokens < _POOL_TOKENS:
            dialogue = draw_dialogue(f"{seed} {pools} {len(pool)}", phase, pieces)
            ids, learnt = encode(dialogue, tokenizer)
            # A skipped dialogue takes up a slot too, or the same seed would be drawn again.
            kept = len(ids) <= longest
            pool.append(_Example(ids, learnt, dialogue.images) if kept else _Example([], [], []))
            tokens += len(ids) if kept else 0
        batches = list(_cut([example for example in pool if example.ids], batch_tokens))
        random.Random(f"{seed} {pools}").shuffle(batches)
        yield from batches
        pools += 1


def _cut(pool: list[_Example], batch_tokens: int) -> Iterator[Batch]:
    for pictured in (False, True):
        chosen = sorted((e for e in pool if bool(e.images) == pictured), key=lambda e: len(e.ids))
        start = 0
        while start < len(chosen):
            end = start
            while end < len(chosen) and (end - start + 1) * len(chosen[end].ids) <= batch_tokens:
                end += 1
            yield _batch(chosen[start : max(end, start + 1)])
            start = max(end, start + 1)


def _batch(examples: list[_Example]) -> Batch:
    longest = max(len(example.ids) for example in examples)
    ids = np.zeros((len(examples), longest), dtype=np.int64)
    learnt = np.zeros((len(examples), longest), dtype=bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        learnt[row, : len(example.ids)] = example.learnt
    images = [image for example in examples for image in example.images]
    pixels, grids = vision_inputs(images) if images else (None, None)
    return Batch(torch.from_numpy(ids), torch.from_numpy(np.stack(np.nonzero(learnt))), pixels, grids)
