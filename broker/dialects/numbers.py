"""Answers in numbers, one document over one flight: collected in whatever order texts are answered.

Each text's part of the document is written when its numbers come: never so many at once that other clients
would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.dialects.answer import DOCUMENT_BYTES_MAX, failure_in
from broker.dispatch.flight import Batch
from protocol.errors import Code, RequestError
from protocol.messages import Encoded, Finished
from protocol.parts import Usage


class Collected:
    """`http.respond.Renderer`, but for how a text's numbers and the document are written."""

    content_type = b"application/json"

    def __init__(self, count: int) -> None:
        """`count`: of texts."""
        self.over = False
        self._entries: list[bytes] = [b""] * count
        self._bytes = 0

    def wait(self) -> bytes:
        """Nothing: it comes in one piece."""
        return b""

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The document once it is complete, nothing before."""
        if error := failure_in(batches):
            raise error
        for item in (item for _, items in batches for item in items):
            match item:
                case Encoded():
                    self._collect(item)
                case Finished(usage=usage):
                    self.over = True
                    return self.document(self._entries, usage)
        return b""

    def _collect(self, message: Encoded) -> None:
        for place, vector in _vectors(message):
            self._entries[place] = entry = self.entry(place, vector)
            self._bytes += len(entry)
        if self._bytes > DOCUMENT_BYTES_MAX:
            message_ = f"The answer has grown beyond {DOCUMENT_BYTES_MAX} bytes: ask for fewer texts at once."
            raise RequestError(Code.ENGINE_ERROR, message_)

    def entry(self, place: int, vector: bytes) -> bytes:
        """What is kept of a text's numbers, float32 and little-endian."""
        raise NotImplementedError

    def document(self, entries: Sequence[bytes], usage: Usage) -> bytes:
        """All of it, of the entries in the order of the texts."""
        raise NotImplementedError


def _vectors(message: Encoded) -> Iterator[tuple[int, bytes]]:
    size = len(message.vectors) // max(1, len(message.places))
    for number, place in enumerate(message.places):
        yield place, message.vectors[number * size : (number + 1) * size]


def usage_object(usage: Usage) -> dict[str, int]:
    """Nothing is generated, so there is one number."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
