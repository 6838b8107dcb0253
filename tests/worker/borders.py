"""How near a sampled draw was to another token: in float64, from upstream's logits.

A draw falls where a uniform number lies between the sums of the tokens' probabilities. Logits of a row in a
batch and alone differ in their last bits; a number that lies within that of a border can fall on either side.
"""

from __future__ import annotations

import numpy as np

from worker.contract import Draw
from worker.engine.sampling.distribution import mixed, uniforms_at
from worker.engine.sampling.ranking import BLOCK


def distance(logits: np.ndarray, draw: Draw, position: int) -> float:
    """The least distance of the numbers drawn at a position from a border, or of a filter's bar from a sum.

    `logits`: [vocabulary] float64, of a row without penalties and bias.
    """
    numbers = uniforms_at(mixed(draw.seed), position)
    order = np.argsort(-logits)
    weights = np.exp((logits - logits.max()) / draw.temperature)
    found: list[float] = []
    kept = np.ones_like(weights, dtype=bool)
    if draw.top_p < 1:
        masses = np.exp(logits[order] - logits.max())
        before = (np.cumsum(masses) - masses) / masses.sum()
        kept[order[before >= draw.top_p]] = False
        found.append(float(np.abs(before - draw.top_p).min()))
    if draw.min_p > 0:
        kept &= logits >= logits.max() + np.log(draw.min_p)
    if draw.top_k:
        kept[order[draw.top_k :]] = False
        return min([*found, _nearest((weights * kept)[order[: draw.top_k]], numbers[0])])
    weights = np.append(weights * kept, np.zeros(-len(weights) % BLOCK)).reshape(-1, BLOCK)
    block = int(np.argmax(np.cumsum(weights.sum(axis=1)) >= numbers[0] * weights.sum()))
    return min([*found, _nearest(weights.sum(axis=1), numbers[0]), _nearest(weights[block], numbers[1])])


def _nearest(weights: np.ndarray, number: float) -> float:
    return float(np.abs(np.cumsum(weights) / weights.sum() - number).min())
