"""Responses that are kept, so that a client can ask for one again, or go on from it by its id alone. Pure.

Who owns a response is the key that asked for it; to all others it is not there. What must always hold: the
store keeps to its bounds, the oldest goes first, and nothing is counted twice. A conversation is kept in
pieces, an input and an output for each turn, which the responses of one conversation share; so one can be
gone on from although those before it are forgotten. It is in the gateway's memory and goes with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.dialects.body import encode
from protocol.errors import Code, RequestError

RESPONSE_BYTES, PIECE_BYTES = 1024, 16
"""What a response takes in memory beside what is encoded, and a piece once more in each that has it."""

_items: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_document: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True, eq=False)
class Piece:
    """Items, encoded. `uses`: how many responses that are kept have it."""

    encoded: bytes
    uses: int = 0

    @classmethod
    def of(cls, items: list[dict[str, Any]]) -> Piece:
        return cls(encode(items))

    def items(self) -> list[dict[str, Any]]:
        return _items.decode(self.encoded)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A response. `pieces`: the conversation in order, the last one is its own output, which `head`, the
    document, is without."""

    head: bytes
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any], before: tuple[Piece, ...]) -> Kept:
        """`before`: all that it answers."""
        output = Piece.of(document["output"])
        return cls(encode({**document, "output": []}), (*before, output))

    def document(self) -> dict[str, Any]:
        return _document.decode(self.head) | {"output": self.pieces[-1].items()}

    def input(self) -> list[dict[str, Any]]:
        return [item for piece in self.pieces[:-1] for item in piece.items()]

    @property
    def conversation_bytes(self) -> int:
        return sum(len(piece.encoded) for piece in self.pieces)


class Store:
    """By owner and id. On the event loop."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        """`count_max`: 0: nothing is kept."""
        self.bytes = 0
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[bytes, str], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps(self) -> bool:
        """Anything at all."""
        return self._count_max > 0

    def put(self, owner: bytes, id: str, kept: Kept) -> None:
        """The newest; what is too large for the whole store is forgotten at once."""
        self.bytes += _own_bytes(kept)
        for piece in kept.pieces:
            self.bytes += 0 if piece.uses else len(piece.encoded)
            piece.uses += 1
        self._kept[owner, id] = kept
        while self._kept and (len(self._kept) > self._count_max or self.bytes > self._bytes_max):
            _, oldest = self._kept.popitem(last=False)
            self._forget(oldest)

    def get(self, owner: bytes, id: str) -> Kept:
        """Raises `RequestError(response_not_found)`."""
        if (kept := self._kept.get((owner, id))) is None:
            raise _unknown(id)
        return kept

    def delete(self, owner: bytes, id: str) -> None:
        """Raises `RequestError(response_not_found)`."""
        if (kept := self._kept.pop((owner, id), None)) is None:
            raise _unknown(id)
        self._forget(kept)

    def _forget(self, kept: Kept) -> None:
        self.bytes -= _own_bytes(kept)
        for piece in kept.pieces:
            piece.uses -= 1
            self.bytes -= 0 if piece.uses else len(piece.encoded)


def _own_bytes(kept: Kept) -> int:
    return RESPONSE_BYTES + len(kept.head) + PIECE_BYTES * len(kept.pieces)


def _unknown(id: str) -> RequestError:
    message = f"Response with id {id[:128]!r} not found: it was never kept, or is not kept any more."
    return RequestError(Code.RESPONSE_NOT_FOUND, message)
