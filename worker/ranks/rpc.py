"""RPC messages between ranks: the leader's calls, as in `worker.interfaces.Engine`, and followers'
messages.

Plain values. Cache slices stay on their rank; messages refer to them by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from protocol.types import RankMemory
from worker.values import LogprobTargets, SamplingParams


class _RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; each is one frame."""


# --- from the leader ---


class Join(_RankMessage, frozen=True, tag=True, array_like=True):
    """All ranks have connected: join upstream's group, then read the weights. `measures_verify_cost`: measure
    the cost of verifying drafts."""

    measures_verify_cost: bool = False


class Prove(_RankMessage, frozen=True, tag=True, array_like=True):
    """All ranks have read their weights: probe the batching capabilities, and warm up."""


class Prefill(_RankMessage, frozen=True, tag=True, array_like=True):
    chunks: dict[str, list[int]]
    targets: dict[str, LogprobTargets] = {}
    last: dict[str, int] = {}


class Expect(_RankMessage, frozen=True, tag=True, array_like=True):
    row: str
    tokens: int


class Fork(_RankMessage, frozen=True, tag=True, array_like=True):
    row: str
    copy: str


class StartRow(_RankMessage, frozen=True, tag=True, array_like=True):
    """Start a row. `sampling`: without its grammar; `held`: it has one, which only the leader uses."""

    row: str
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    held: bool = False


class RunStep(_RankMessage, frozen=True, tag=True, array_like=True):
    drafts: dict[str, list[int]] = {}


class CutOut(_RankMessage, frozen=True, tag=True, array_like=True):
    """Copy cache slices. The runs are numbered from `first` on, followed by the states."""

    row: str
    runs: list[tuple[int, int]]
    states: bool
    first: int


class Restore(_RankMessage, frozen=True, tag=True, array_like=True):
    """Restore a row. `pieces`: each slice's number and the other fields of `CacheSegment`."""

    row: str
    pieces: list[tuple[int, int, int, int]]
    states: int | None


class DropRow(_RankMessage, frozen=True, tag=True, array_like=True):
    row: str


class Reset(_RankMessage, frozen=True, tag=True, array_like=True):
    pass


class Release(_RankMessage, frozen=True, tag=True, array_like=True):
    """Free cache slices that will not be restored again."""

    numbers: list[int]


Call = (
    Join | Prove | Prefill | Expect | Fork | StartRow | RunStep | CutOut | Restore | DropRow | Reset | Release
)

# --- from followers ---


class RankUp(_RankMessage, frozen=True, tag=True, array_like=True):
    """The process runs and accepts calls. `host`: its machine's host name."""

    rank: int
    host: str


class WeightsLoaded(_RankMessage, frozen=True, tag=True, array_like=True):
    """The rank's weights are in memory."""

    rank: int


class MemoryReport(_RankMessage, frozen=True, tag=True, array_like=True):
    """Current memory usage of the rank's process, sent after warm-up and from time to time after calls."""

    taken: RankMemory


class Refused(_RankMessage, frozen=True, tag=True, array_like=True):
    """The rank cannot load its shard. `for_good`: retrying does not help."""

    rank: int
    why: str
    for_good: bool


Word = RankUp | WeightsLoaded | MemoryReport | Refused

_ENCODER = msgspec.msgpack.Encoder()
_CALLS: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)

S = TypeVar("S", bound=_RankMessage)


def encode(said: _RankMessage) -> bytes:
    return _ENCODER.encode(said)


def decode_call(frame: bytes) -> Call:
    """Decode a call. Raises `msgspec.MsgspecError` or `ValueError` for an invalid frame."""
    return _CALLS.decode(frame)


def decode_word(frame: bytes) -> Word:
    """Decode a follower's message. Raises as `decode_call` does."""
    return _WORDS.decode(frame)


def lists(rows: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return `rows` with lists, as messages require."""
    return {row: list(tokens) for row, tokens in rows.items()}
