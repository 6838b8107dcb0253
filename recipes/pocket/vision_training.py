"""Pre-training of the vision tower alone: classify a picture's shape, colour and background.

Trained behind a language model it learns colours, but within ten thousand steps it did not begin to learn
shapes: the answer's few tokens carry too little signal. Three linear heads on the mean of its tokens,
discarded afterwards, provide all of it at once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from recipes.pocket.batches import MERGE, vision_inputs
from recipes.pocket.fillers import Fillers
from recipes.pocket.muon import Muon
from recipes.pocket.pictures import PALETTE, SHAPES, Picture
from recipes.pocket.progress_log import ProgressLog

STEPS = 2400
PICTURES = 64
"""Pictures per step; every eighth is of one colour."""
_WARM_UP = 50
_DECAY_SHARE = 0.4
_MUON_RATE, _ADAM_RATE = 5e-3, 2.5e-3
_LOG_EVERY = 200

_SHAPES = (*SHAPES, None)
_COLOURS = tuple(PALETTE)


def teach_eyes(eyes: Any, width: int, seed: int, log: Path) -> None:
    """Train the vision tower `eyes`, whose tokens have `width` components, in place."""
    told = ProgressLog(log)
    torch.manual_seed(seed)
    heads = torch.nn.ModuleList(torch.nn.Linear(width, len(of)) for of in (_SHAPES, _COLOURS, _COLOURS))
    optimizers = _optimizers(eyes, heads)
    right = shown = 0
    for step in range(STEPS):
        pictures = [_draw(f"eyes {seed} {step} {index}", index) for index in range(PICTURES)]
        seen = _seen(eyes, pictures)
        guesses = [head(seen) for head in heads]
        truths = _truths(pictures)
        shape, colour, ground = (F.cross_entropy(g, t) for g, t in zip(guesses, truths, strict=True))
        (shape + (colour + ground) / 2).backward()
        torch.nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        _update(optimizers, step)
        right += int((guesses[0].argmax(-1) == truths[0]).sum())
        shown += PICTURES
        if (step + 1) % _LOG_EVERY == 0:
            told.line(f"eyes {step + 1} shapes {right / shown:.3f}")
            right = shown = 0


def _draw(seed: str, index: int) -> Picture:
    return Picture(Fillers(random.Random(seed)), plain=index % 8 == 0)


def _seen(eyes: Any, pictures: list[Picture]) -> torch.Tensor:
    """Return [pictures, width]: the mean of each picture's tokens."""
    pixels, grids = vision_inputs([picture.pixels for picture in pictures])
    tokens = eyes(pixels, grids).pooler_output
    counts = [(int(rows) // MERGE) * (int(columns) // MERGE) for _, rows, columns in grids]
    return torch.stack([part.mean(0) for part in tokens.split(counts)])


def _truths(pictures: list[Picture]) -> list[torch.Tensor]:
    return [
        torch.tensor([_SHAPES.index(picture.shape) for picture in pictures]),
        torch.tensor([_COLOURS.index(picture.colour) for picture in pictures]),
        torch.tensor([_COLOURS.index(picture.ground) for picture in pictures]),
    ]


def _optimizers(eyes: Any, heads: torch.nn.ModuleList) -> list[Any]:
    matrices, rest = [], list(heads.parameters())
    for name, parameter in eyes.named_parameters():
        (matrices if parameter.ndim > 1 and "pos_embed" not in name else rest).append(parameter)
    return [
        Muon([{"params": matrices}], rate=_MUON_RATE, decay=0.02),
        torch.optim.AdamW(rest, lr=_ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _update(optimizers: list[Any], step: int) -> None:
    left = (STEPS - step) / (STEPS * _DECAY_SHARE)
    share = min(1.0, (step + 1) / _WARM_UP, max(0.02, left))
    for optimizer, rate in zip(optimizers, (_MUON_RATE, _ADAM_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        optimizer.step()
        optimizer.zero_grad()
