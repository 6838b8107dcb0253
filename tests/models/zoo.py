"""One tiny config for each kind of layer and cache in mlx-lm, and for mixes of them.

Windows and chunks are a few tokens, so that a short prompt exceeds them. Recurrent states decay slowly.
Experts are few, so that every one is used. Sizes satisfy upstream's Metal kernels: recurrent heads are
multiples of 32 wide.
"""

from __future__ import annotations

from tests.models.configs import Config
from tests.models.zoo_attention import FULL, LATENT_ATTENTION, OWN_CACHE, SLIDING
from tests.models.zoo_states import MIXED, STATES

ZOO: dict[str, Config] = FULL | LATENT_ATTENTION | SLIDING | STATES | MIXED | OWN_CACHE
