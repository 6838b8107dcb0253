"""Interfaces of grammar-constrained decoding: which tokens are allowed next, and which are forced.

`worker/grammars` implements them with llguidance. `SamplingParams` in `worker/contract/engine.py` refers to
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ForcedTokens(NamedTuple):
    """Forced continuation of an output (jump-forward). The first `certain` tokens are the only allowed ones.
    The others are the likeliest form; the same text may also come as other tokens or white space."""

    tokens: tuple[int, ...] = ()
    certain: int = 0


class GuideError(Exception):
    """A grammar allows no next token, or is too complex for the text generated so far."""


class Guide(Protocol):
    """Grammar state of one output: a function of its tokens alone.

    Used by one thread at a time, not always the same one.
    """

    def accept_token(self, token: int) -> None:
        """Advance by the output's next token, sampled or forced. A disallowed token ends the constraint."""

    def fill(self, mask: memoryview) -> bool:
        """Set bit t % 32 of word t // 32 of `mask` (uint32) for each allowed token t. False: all tokens are
        allowed, and nothing was written. At least one is always allowed. Releases the GIL if it takes long.

        `mask` is zeroed and has a bit for each of the model's logits, which may outnumber the tokens."""

    def forced_tokens(self, most: int) -> ForcedTokens:
        """Return at most `most` forced tokens. The state does not change."""


class Grammar(Protocol):
    """Compiled grammar of a request. Immutable and shared between threads."""

    def open(self, answered: Sequence[int]) -> Guide:
        """Return the state after the output tokens `answered`. Cheap apart from replaying those."""
