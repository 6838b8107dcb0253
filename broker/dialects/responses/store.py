"""Responses that are kept, so that a client can ask for one again, or go on from it by its id alone. Pure.

Who owns a response is the key that asked for it; to all others it is not there. What must always hold: the
store keeps to its bounds, and nothing is counted twice. Where it is full, it is the oldest one of whoever has
most that goes: nobody loses what he has to somebody who has more of it. A conversation is kept in
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

Owner = bytes
"""The digest of a key; empty: whoever has none."""

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


class _Shelf:
    """What one owner has, the oldest first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.bytes = 0

    def add(self, id: str, kept: Kept) -> None:
        self.bytes += _own_bytes(kept)
        for piece in kept.pieces:
            self.bytes += 0 if piece.uses else len(piece.encoded)
            piece.uses += 1
        self.kept[id] = kept

    def drop(self, id: str) -> None:
        kept = self.kept.pop(id)
        self.bytes -= _own_bytes(kept)
        for piece in kept.pieces:
            piece.uses -= 1
            self.bytes -= 0 if piece.uses else len(piece.encoded)


class Store:
    """By owner and id. On the event loop."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        """`count_max`: 0: nothing is kept."""
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._shelves: dict[Owner, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def bytes(self) -> int:
        return sum(shelf.bytes for shelf in self._shelves.values())

    @property
    def keeps(self) -> bool:
        """Anything at all."""
        return self._count_max > 0

    def put(self, owner: Owner, id: str, kept: Kept) -> None:
        """The newest of its owner's; what is too large for the whole store is forgotten at once."""
        self._shelves.setdefault(owner, _Shelf()).add(id, kept)
        while (are_many := len(self) > self._count_max) or self.bytes > self._bytes_max:
            size = _count if are_many else _bytes
            most = max(self._shelves, key=lambda owner: size(self._shelves[owner]))
            self._drop(most, next(iter(self._shelves[most].kept)))

    def get(self, owner: Owner, id: str) -> Kept:
        """Raises `RequestError(response_not_found)`."""
        shelf = self._shelves.get(owner)
        if shelf is None or (kept := shelf.kept.get(id)) is None:
            raise _unknown(id)
        return kept

    def delete(self, owner: Owner, id: str) -> None:
        """Raises `RequestError(response_not_found)`."""
        self.get(owner, id)
        self._drop(owner, id)

    def _drop(self, owner: Owner, id: str) -> None:
        self._shelves[owner].drop(id)
        if not self._shelves[owner].kept:
            del self._shelves[owner]


def _count(shelf: _Shelf) -> int:
    return len(shelf.kept)


def _bytes(shelf: _Shelf) -> int:
    return shelf.bytes


def _own_bytes(kept: Kept) -> int:
    return RESPONSE_BYTES + len(kept.head) + PIECE_BYTES * len(kept.pieces)


def _unknown(id: str) -> RequestError:
    message = f"Response with id {id[:128]!r} not found: it was never kept, or is not kept any more."
    return RequestError(Code.RESPONSE_NOT_FOUND, message)
