"""Store of responses, which clients can get again or continue by id: entries of the journal. Pure.

A response is visible to its owner alone. A conversation is stored in pieces, an input and an output for each
turn, which its responses share. So a response can be continued even after its predecessors are gone.
Conversations that clients name by an id are stored in the same way (`conversations`); a response is written
when it ends (`requests.durable`).

The journal keeps all of them within a quota (`--responses-max`, `--responses-bytes-max`): when it is reached,
the oldest of the owner with the most gives way. What has not changed for `journal.file.AGE_S_MAX` is deleted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from broker.dialects.body import encode
from broker.journal.file import Append, Delete, JournalQueue, Name, Operation, Put, Replace, StoredEntry
from protocol.errors import Code, RequestError

KIND = "response"
"""Kind of the journal's entries."""

_items: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_document: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True, eq=False)
class StoredItems:
    """Encoded items. `digest`: SHA-256 of them, once it was needed."""

    encoded: bytes
    digest: bytes = b""

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


class _Record(Struct, frozen=True, kw_only=True):
    """Head of an entry: of the response, and the digests of its pieces. Items are digests of further ones."""

    head: bytes
    pieces: list[bytes]


_record: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(_Record)
_digests: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


class ResponseStore:
    """Stored responses by owner and id. For use on the event loop; nothing here waits but `get`."""

    def __init__(
        self, journal: JournalQueue, read: Callable[[Name], Awaitable[StoredEntry | None]], *, keeps: bool
    ) -> None:
        """`read`: returns an entry of the journal. `keeps`: whether responses are stored at all."""
        self.keeps = keeps
        self.changes = 0
        """Number of changes so far."""
        self._journal = journal
        self._read = read

    def put(self, owner: str, id: str, response: StoredResponse) -> None:
        """Add or replace a response, as its owner's newest."""
        blobs = blobs_of(response.pieces)
        head = _head(response)
        self._add(Put(name(owner, id), head, blobs, ended=True, owner=owner), head, *blobs.values())

    def extend(self, owner: str, id: str, pieces: Iterable[StoredItems]) -> None:
        """Add pieces to a conversation, as its owner's newest; without effect if it is not stored."""
        blobs = blobs_of(pieces)
        self._add(Replace(name(owner, id), None, ended=True))  # first, or it could give way to itself
        self._add(Append(name(owner, id), msgspec.msgpack.encode(list(blobs)), blobs), *blobs.values())

    def drop(self, owner: str, id: str) -> None:
        """Delete a response; without effect if it is not stored."""
        self._add(Delete(name(owner, id)))

    def _add(self, operation: Operation, *parts: bytes) -> None:
        self.changes += 1
        self._journal.add(operation, sum(map(len, parts)))

    async def get(self, owner: str, id: str) -> StoredResponse:
        """Return a response. Raises `RequestError`: `response_not_found`, or `storage_failed` if the disk
        cannot be read."""
        try:
            entry = await self._read(name(owner, id))
        except OSError as error:
            raise RequestError(Code.STORAGE_FAILED, f"What is stored cannot be read: {error}.") from None
        if entry is None:
            raise unknown(id)
        try:
            record = _record.decode(entry.head)
            items = dict.fromkeys(entry.items)  # a restored answer may have added its own again
            digests = [*record.pieces, *(one for item in items for one in _digests.decode(item))]
            pieces = tuple(StoredItems(entry.blobs[digest], digest) for digest in digests)
        except (msgspec.MsgspecError, KeyError):  # of another version
            raise unknown(id) from None
        return StoredResponse(record.head, pieces)

    async def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises as `get`."""
        await self.get(owner, id)
        self.drop(owner, id)


def name(owner: str, id: str) -> Name:
    """Return the name of a response's entry."""
    return KIND, f"{owner}:{id}"


def _head(response: StoredResponse) -> bytes:
    pieces = [digest_of(piece) for piece in response.pieces]
    return msgspec.msgpack.encode(_Record(head=response.head, pieces=pieces))


def blobs_of(pieces: Iterable[StoredItems]) -> dict[bytes, bytes]:
    """Return the encoded pieces by digest."""
    return {digest_of(piece): piece.encoded for piece in pieces}


def digest_of(piece: StoredItems) -> bytes:
    """Return the digest of a piece, computed once."""
    if not piece.digest:
        piece.digest = sha256(piece.encoded).digest()
    return piece.digest


def unknown(id: str) -> RequestError:
    """Make the error for a response that is not stored."""
    message = f"Response with id {id[:128]!r} not found: it is not stored, or no longer."
    return RequestError(Code.RESPONSE_NOT_FOUND, message)
