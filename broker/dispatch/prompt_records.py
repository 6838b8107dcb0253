"""Records of prompts, which later prompts are compared with to say why they missed the prefix cache. Pure.

A record is what the cache depends on, in the order of a prompt: model, cache salt, tools, options of the chat
template, messages. A record belongs to the API key of its request. The store is bounded; the oldest record is
evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from broker.dispatch.flight import Flight
from broker.dispatch.prefix_hashes import Hashes, all_prefix_hashes, capped
from protocol.messages import Generate

RECORDS_MAX = 2048
"""Maximum number of records, of at most about 6 KB each."""

Change = Literal["model", "salt", "tools", "system", "messages", "options"]


class _Role(Struct):
    role: str = ""


_messages: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_role: msgspec.msgpack.Decoder[_Role] = msgspec.msgpack.Decoder(_Role)


@dataclass(slots=True, eq=False)
class PromptRecord:
    """`system`, `tools`, `options`: digests. `marks`: hashes of the messages' prefixes. `flight`: while it
    is open, it counts the tokens."""

    model: str
    salt: str
    tools: bytes
    options: bytes
    system: bytes
    marks: Hashes
    counted_tokens: int = 0
    flight: Flight | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens; 0 until a worker has counted them."""
        return self.counted_tokens if self.flight is None else self.flight.prompt_tokens

    @property
    def size(self) -> int:
        """Size of the messages in bytes."""
        return self.marks[-1][1] if self.marks else 0


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Comparison with an earlier prompt. `change`: the first difference; None: the earlier prompt is a
    prefix. `kept_tokens`: about how many of its tokens are before that; `lost_tokens`: behind it."""

    change: Change | None
    kept_tokens: int = 0
    lost_tokens: int = 0


def record_of(model: str, request: Generate) -> PromptRecord:
    """Return the record of a request, with the hashes of all prefixes."""
    hashes = all_prefix_hashes(structs.replace(request, tools=UNSET, cache_salt=""))
    return PromptRecord(
        model=model,
        salt=request.cache_salt,
        tools=_digest(request.tools),
        options=_digest(request.template_kwargs),
        system=_digest(_system(request)),
        marks=hashes.hashes,
    )


def compare(earlier: PromptRecord, later: PromptRecord) -> PromptComparison:
    """Return the first difference between two prompts. `later` has the hashes of all prefixes."""
    known = {mark for mark, _ in later.marks}
    common = max((size for mark, size in earlier.marks if mark in known), default=0)
    differs: dict[Change, bool] = {
        "model": earlier.model != later.model,
        "salt": earlier.salt != later.salt,
        "tools": earlier.tools != later.tools,
        "system": earlier.system != later.system,
        "messages": common < earlier.size,
        "options": earlier.options != later.options,
    }
    change = next((change for change, is_different in differs.items() if is_different), None)
    if change is None:
        return PromptComparison(None, earlier.prompt_tokens)
    kept = round(earlier.prompt_tokens * common / earlier.size) if change == "messages" else 0
    return PromptComparison(change, kept, earlier.prompt_tokens - kept)


class PromptRecords:
    """Records by owner and id of the answer, oldest first. For use on the event loop."""

    def __init__(self, count_max: int = RECORDS_MAX) -> None:
        self._count_max = count_max
        self._records: OrderedDict[tuple[str, str], PromptRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, owner: str, id: str) -> PromptRecord | None:
        """Return the record of an answer; None: unknown, evicted, or another owner's."""
        return self._records.get((owner, id))

    @contextmanager
    def recording(
        self, owner: str, id: str, record: PromptRecord, flights: AbstractContextManager[Sequence[Flight]]
    ) -> Iterator[Sequence[Flight]]:
        """Record a prompt while and after its flight is open."""
        with flights as opened:
            kept = replace(record, marks=capped(record.marks), flight=opened[0])
            self._records[owner, id] = kept
            if len(self._records) > self._count_max:
                self._records.popitem(last=False)
            try:
                yield opened
            finally:
                kept.counted_tokens, kept.flight = kept.prompt_tokens, None


def _system(request: Generate) -> Raw | UnsetType:
    """Return the first message, if it is the system prompt."""
    if request.messages is UNSET:
        return UNSET
    try:
        [first, *_] = _messages.decode(request.messages)
        return first if _role.decode(first).role == "system" else UNSET
    except (msgspec.MsgspecError, ValueError):
        return UNSET  # the worker will report the error


def _digest(packed: Raw | UnsetType) -> bytes:
    return b"" if packed is UNSET else hashlib.blake2b(bytes(packed), digest_size=16).digest()
