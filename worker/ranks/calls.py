"""What the ranks of a set say to each other: the first one calls, as `worker.contract` has it, others obey.

Plain values. What is cut of rows stays on each rank: here it has a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from protocol.parts import RankTaken
from worker.contract import Draw, Targets


class _Said(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message, one frame."""


# --- from the first rank ---


class Join(_Said, frozen=True, tag=True, array_like=True):
    """All ranks are there: meet them in upstream's group, then read the weights. `uses_heads`: and whatever
    guesses by what the model thinks. `has_drafts`: it is measured what they cost."""

    uses_heads: bool = False
    has_drafts: bool = False


class Prove(_Said, frozen=True, tag=True, array_like=True):
    """All have read their weights: try what rows can do, and warm up."""


class Prefill(_Said, frozen=True, tag=True, array_like=True):
    chunks: dict[str, list[int]]
    targets: dict[str, Targets] = {}


class LeaveOut(_Said, frozen=True, tag=True, array_like=True):
    row: str
    first: int
    last: int


class Fork(_Said, frozen=True, tag=True, array_like=True):
    row: str
    copy: str


class Start(_Said, frozen=True, tag=True, array_like=True):
    """`draw`: without its grammar; `held`: it has one, which only the first rank asks."""

    row: str
    tokens: list[int]
    prompt_tokens: int
    draw: Draw
    held: bool = False


class Step(_Said, frozen=True, tag=True, array_like=True):
    drafts: dict[str, list[int]] = {}


class CutOut(_Said, frozen=True, tag=True, array_like=True):
    """What is cut has the numbers from `first` on, the states the one behind those of the runs."""

    row: str
    runs: list[tuple[int, int]]
    states: bool
    first: int


class Restore(_Said, frozen=True, tag=True, array_like=True):
    """`pieces`: the number of each, and `Piece`'s other fields."""

    row: str
    pieces: list[tuple[int, int, int, int]]
    states: int | None


class Drop(_Said, frozen=True, tag=True, array_like=True):
    row: str


class Reset(_Said, frozen=True, tag=True, array_like=True):
    pass


class LetGo(_Said, frozen=True, tag=True, array_like=True):
    """Nobody will restore these any more."""

    numbers: list[int]


Call = Join | Prove | Prefill | LeaveOut | Fork | Start | Step | CutOut | Restore | Drop | Reset | LetGo

# --- from the others ---


class Here(_Said, frozen=True, tag=True, array_like=True):
    """The process runs, and can be told what to do. `host`: what its machine calls itself."""

    rank: int
    host: str


class Read(_Said, frozen=True, tag=True, array_like=True):
    """Its weights are in memory."""

    rank: int


class Told(_Said, frozen=True, tag=True, array_like=True):
    """What its process takes just now: after the proof, and now and then behind what it was called to do."""

    taken: RankTaken


class Refused(_Said, frozen=True, tag=True, array_like=True):
    """It cannot have its part of the model. `for_good`: trying again is no help."""

    rank: int
    why: str
    for_good: bool


Word = Here | Read | Told | Refused

_ENCODER = msgspec.msgpack.Encoder()
_CALLS: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)

S = TypeVar("S", bound=_Said)


def encode(said: _Said) -> bytes:
    return _ENCODER.encode(said)


def decode_call(frame: bytes) -> Call:
    """Raises `msgspec.MsgspecError`, or a `ValueError`, for whatever is none."""
    return _CALLS.decode(frame)


def decode_word(frame: bytes) -> Word:
    """As `decode_call`."""
    return _WORDS.decode(frame)


def lists(rows: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """As they are sent."""
    return {row: list(tokens) for row, tokens in rows.items()}
