"""Distance of a sampled draw from another token, in float64, from upstream's logits.

Sampling picks the token in whose cumulative-probability interval a uniform number falls. Logits of a row in a
batch and alone differ in their last bits, so a number that close to a border can fall on either side.
"""

from __future__ import annotations

import numpy as np

from worker.runner.sampling.distribution import BLOCK, mixed, uniforms_at
from worker.values import SamplingParams


def distance(logits: np.ndarray, sampling: SamplingParams, position: int) -> float:
    """Return the least distance of the uniform numbers at `position` from an interval border, or of a
    filter's threshold from a cumulative sum.

    `logits`: [vocabulary] float64, of a row without penalties and bias.
    """
    numbers = uniforms_at(mixed(sampling.seed), position)
    order = np.argsort(-logits)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    found: list[float] = []
    kept = np.ones_like(weights, dtype=bool)
    if sampling.top_p < 1:
        masses = np.exp(logits[order] - logits.max())
        before = (np.cumsum(masses) - masses) / masses.sum()
        kept[order[before >= sampling.top_p]] = False
        found.append(float(np.abs(before - sampling.top_p).min()))
    if sampling.min_p > 0:
        kept &= logits >= logits.max() + np.log(sampling.min_p)
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
        return min([*found, _nearest((weights * kept)[order[: sampling.top_k]], numbers[0])])
    weights = np.append(weights * kept, np.zeros(-len(weights) % BLOCK)).reshape(-1, BLOCK)
    block = int(np.argmax(np.cumsum(weights.sum(axis=1)) >= numbers[0] * weights.sum()))
    return min([*found, _nearest(weights.sum(axis=1), numbers[0]), _nearest(weights[block], numbers[1])])


def _nearest(weights: np.ndarray, number: float) -> float:
    return float(np.abs(np.cumsum(weights) / weights.sum() - number).min())
