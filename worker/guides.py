"""What answers are held to, as the engine asks for it: which tokens may come next, and what must.

`worker/grammars` answers by llguidance. Below `worker/contract.py`, whose `Draw` has a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Foreseen(NamedTuple):
    """How an answer goes on. Its first `certain` tokens stand there whatever is drawn; the others are the
    likeliest form of what is held to, which may come in other tokens, or other white space."""

    tokens: tuple[int, ...] = ()
    certain: int = 0


class Guide(Protocol):
    """Which tokens may come next in one answer: a function of its tokens alone.

    Used by one thread at a time, not always the same one.
    """

    def saw(self, token: int) -> None:
        """The next token of the answer, drawn or forced. One that may not have come frees all that follow."""

    def fill(self, mask: memoryview) -> bool:
        """Say what may follow: bit t % 32 of word t // 32 of `mask`, uint32, is set where token t may. False:
        anything may, and nothing was written. Some token always may. Releases the GIL where it takes long.

        `mask` has a bit for each of the model's logits, all 0: there may be more of them than tokens."""

    def foresee(self, most: int) -> Foreseen:
        """With at most so many tokens, what there is but one way of. Changes nothing of what follows."""


class Grammar(Protocol):
    """What one request's answer is held to, compiled. Shared between threads, and never changed."""

    def open(self, answered: Sequence[int]) -> Guide:
        """For an answer that has got so far. Cheap but for what is answered already."""
