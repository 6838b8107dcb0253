"""Renderer of embeddings and rerank scores: one document from one flight, collected in any order of texts.

Each text's entry is encoded when its vector arrives, which spreads the work so that other clients never wait
for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from broker.dialects.renderers import DocumentRenderer
from broker.dispatch.flight import Item
from protocol.messages import EmbeddingChunk, Finished
from protocol.types import Usage


class VectorRenderer(DocumentRenderer):
    """Base renderer of vectors. Subclasses encode the entry of a text, and the document."""

    advice = " Send fewer texts per request."

    def __init__(self, count: int) -> None:
        """`count`: number of texts."""
        super().__init__()
        self.usage = Usage(prompt_tokens=0, completion_tokens=0)
        self.entries: list[bytes] = [b""] * count
        """In the order of the texts."""

    def collect(self, choice: int, item: Item) -> None:
        match item:
            case EmbeddingChunk():
                for place, vector in _vectors(item):
                    self.entries[place] = entry = self.entry(place, vector)
                    self.count(len(entry))
            case Finished():
                self.over, self.usage = True, item.usage

    @abstractmethod
    def entry(self, place: int, vector: bytes) -> bytes:
        """Encode the entry of one text. `vector`: little-endian float32."""


def _vectors(message: EmbeddingChunk) -> Iterator[tuple[int, bytes]]:
    size = len(message.vectors) // max(1, len(message.places))
    for number, place in enumerate(message.places):
        yield place, message.vectors[number * size : (number + 1) * size]


def usage_object(usage: Usage) -> dict[str, int]:
    """Return token usage. Nothing is generated, so both counts are equal."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
