"""Texts that a model answers with numbers: what passes between those who prepare, schedule and encode them.

Ground of the worker, as `contract`, which adds the model itself. Only plain Python values cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Embed, Rank


@dataclass(frozen=True, slots=True)
class Text:
    """One text, tokenized. `types`: which of two parts each token belongs to, 0 or 1; empty: all to the
    first. `dimensions`: so many numbers of its vector are wanted, at length 1 again; None: all of them."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The texts of one request, each within the model's context. Of those at the places in `answered` the
    client has the vectors. Of several waiting the smallest `priority` goes first. `deadline_s`: seconds from
    its arrival after which it is given up; None: never."""

    id: str
    texts: tuple[Text, ...]
    answered: frozenset[int] = frozenset()
    priority: int = 0
    deadline_s: float | None = None

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class Encoder(Protocol):
    """A model that answers each text with a vector. Used by the model thread only."""

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        """The vector of each, float32, little-endian. Padding is the encoder's own matter: a text's vector
        does not depend on those beside it."""


class TextsPreparer(Protocol):
    """Tokenizer. Owned by one thread of the pool; never shared, never near MLX."""

    def prepare(self, request: Embed | Rank, media: Sequence[bytes]) -> PreparedTexts:
        """Raises `protocol.errors.RequestError` for whatever the request itself causes."""
