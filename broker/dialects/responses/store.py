"""Store of responses, which clients can get again or continue by id. Pure, in the gateway's memory only.

A response is owned by the API key of its request, and invisible to all others. Invariants: the store stays
within its bounds, and nothing is counted twice. When it is full, the oldest response of the largest owner is
evicted, so no owner loses a response to one that uses more. A conversation is stored in pieces, an input and
an output for each turn, which its responses share. So a response can be continued even after its
predecessors are evicted. Conversations that clients name by an id are stored in the same way
(`conversations`), within the same bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from broker.dialects.body import encode
from protocol.errors import Code, RequestError

RESPONSE_BYTES, PIECE_BYTES = 1024, 16
"""Memory overhead of a response, and of each piece that it references, beside the encoded data."""

Owner = bytes
"""Digest of an API key; empty: requests without one."""

_items: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_document: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True, eq=False)
class StoredItems:
    """Encoded items. `uses`: number of stored responses that share them."""

    encoded: bytes
    uses: int = 0
    digest: bytes = b""
    """SHA-256 of `encoded`, once it was needed."""

    @classmethod
    def of(cls, items: list[dict[str, Any]]) -> StoredItems:
        return cls(encode(items))

    def items(self) -> list[dict[str, Any]]:
        return _items.decode(self.encoded)


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A stored response. `head`: its document without output. `pieces`: the conversation in order, the last
    being the response's own output."""

    head: bytes
    pieces: tuple[StoredItems, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any], before: tuple[StoredItems, ...]) -> StoredResponse:
        """Encode a document. `before`: the conversation up to its output."""
        output = StoredItems.of(document["output"])
        return cls(encode({**document, "output": []}), (*before, output))

    def document(self) -> dict[str, Any]:
        return self.head_document() | {"output": self.pieces[-1].items()}

    def head_document(self) -> dict[str, Any]:
        return _document.decode(self.head)

    def input(self) -> list[dict[str, Any]]:
        return [item for piece in self.pieces[:-1] for item in piece.items()]

    @property
    def conversation_bytes(self) -> int:
        return sum(len(piece.encoded) for piece in self.pieces)


class _Shelf:
    """Responses of one owner, oldest first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def add(self, id: str, kept: StoredResponse) -> None:
        self.bytes += _own_bytes(kept)
        for piece in kept.pieces:
            self.bytes += 0 if piece.uses else len(piece.encoded)
            piece.uses += 1
        self.kept[id] = kept
        self.kept.move_to_end(id)

    def drop(self, id: str) -> None:
        self.release(self.kept.pop(id))

    def release(self, kept: StoredResponse) -> None:
        """Give back the bytes of a response that was dropped or replaced."""
        self.bytes -= _own_bytes(kept)
        for piece in kept.pieces:
            piece.uses -= 1
            self.bytes -= 0 if piece.uses else len(piece.encoded)


class StoreLog(Protocol):
    """Is told of each change of the store, so that another one can be made equal."""

    def put(self, owner: Owner, id: str, kept: StoredResponse) -> None: ...

    def drop(self, owner: Owner, id: str) -> None: ...


class ResponseStore:
    """Stored responses by owner and id. For use on the event loop."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        """`count_max`: 0 disables the store."""
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._shelves: dict[Owner, _Shelf] = {}
        self.log: StoreLog | None = None

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def __iter__(self) -> Iterator[tuple[Owner, str, StoredResponse]]:
        for owner, shelf in self._shelves.items():
            for id, kept in shelf.kept.items():
                yield owner, id, kept

    @property
    def bytes(self) -> int:
        return sum(shelf.bytes for shelf in self._shelves.values())

    @property
    def keeps(self) -> bool:
        """Whether responses are stored at all."""
        return self._count_max > 0

    def put(self, owner: Owner, id: str, kept: StoredResponse) -> None:
        """Add or replace a response, as its owner's newest. One that is too large for the store is evicted at
        once."""
        shelf = self._shelves.setdefault(owner, _Shelf())
        replaced = shelf.kept.get(id)
        shelf.add(id, kept)
        if replaced is not None:
            shelf.release(replaced)
        if self.log is not None:
            self.log.put(owner, id, kept)
        while (are_many := len(self) > self._count_max) or self.bytes > self._bytes_max:
            size = _count if are_many else _bytes
            most = max(self._shelves, key=lambda owner: size(self._shelves[owner]))
            self._drop(most, next(iter(self._shelves[most].kept)))

    def get(self, owner: Owner, id: str) -> StoredResponse:
        """Return a response. Raises `RequestError(response_not_found)`."""
        shelf = self._shelves.get(owner)
        if shelf is None or (kept := shelf.kept.get(id)) is None:
            raise unknown(id)
        return kept

    def delete(self, owner: Owner, id: str) -> None:
        """Delete a response. Raises `RequestError(response_not_found)`."""
        self.get(owner, id)
        self._drop(owner, id)

    def _drop(self, owner: Owner, id: str) -> None:
        self._shelves[owner].drop(id)
        if self.log is not None:
            self.log.drop(owner, id)
        if not self._shelves[owner].kept:
            del self._shelves[owner]


def _count(shelf: _Shelf) -> int:
    return len(shelf.kept)


def _bytes(shelf: _Shelf) -> int:
    return shelf.bytes


def _own_bytes(kept: StoredResponse) -> int:
    return RESPONSE_BYTES + len(kept.head) + PIECE_BYTES * len(kept.pieces)


def unknown(id: str) -> RequestError:
    """Make the error for a response that is not stored."""
    message = f"Response with id {id[:128]!r} not found: it is not stored, or no longer."
    return RequestError(Code.RESPONSE_NOT_FOUND, message)
