"""Interfaces and values of embedding models and rerankers: tokenized texts, preparer, encoder.

Part of the lowest layer, like `contract`, which adds the model. Only plain Python values are passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Embed, Rank
from worker.contract.preparation import NEVER, CancelToken


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text. `types`: token type (0 or 1) of each token; empty: all 0. `dimensions`: truncate its
    vector to this many dimensions and normalize it again; None: all dimensions."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The tokenized texts of one request, each within the model's context. `answered`: indices of texts whose
    vectors the client already has. The smallest `priority` is scheduled first. `deadline_s`: timeout in
    seconds after its arrival; None: none."""

    id: str
    texts: tuple[Text, ...]
    answered: frozenset[int] = frozenset()
    priority: int = 0
    deadline_s: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class Encoder(Protocol):
    """Encoder of an embedding model or reranker. Used by the model thread only."""

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        """Return each text's vector as little-endian float32. The encoder pads as needed: a vector does not
        depend on the other texts."""


class TextsPreparer(Protocol):
    """Tokenizer. Owned by one thread of the pool, never shared; does not use MLX."""

    def prepare(
        self, request: Embed | Rank, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> PreparedTexts:
        """Tokenize the texts. Raises `protocol.errors.RequestError` for an invalid request, and
        `PreparationCancelled` after a cancellation."""
