"""Fuzzer of both decoders with mutated frames: `python -m tests.protocol.fuzz [--frames N] [--seed N]`.

Invariant: decoding any frames returns a message of that direction or raises `WireError`. A run is determined
by its seed; a failure names the seed and prints the frames.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec

from protocol import wire
from tests.protocol.samples import DECODERS, UNIONS, golden_frames

FRAME_BYTES_MAX = 1 << 16
# Type bytes of msgpack, which are the most likely to break a decoder.
_OPENERS = bytes([0xC0, 0xC1, 0xC2, *range(0xC4, 0xE0), 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xD6, 0xFF])
_MEMBERS = {direction: get_args(union) for direction, union in UNIONS.items()}

Mutation = Callable[[random.Random, bytearray], None]


def _place(chance: random.Random, body: bytearray) -> int:
    return chance.randrange(len(body)) if body else 0


def flip_bits(chance: random.Random, body: bytearray) -> None:
    for _ in range(chance.choice((1, 1, 2, 8)) if body else 0):
        body[_place(chance, body)] ^= 1 << chance.randrange(8)


def overwrite(chance: random.Random, body: bytearray) -> None:
    if body:
        body[_place(chance, body)] = chance.choice(_OPENERS)


def insert(chance: random.Random, body: bytearray) -> None:
    place = _place(chance, body)
    body[place:place] = bytes(chance.choices(_OPENERS, k=chance.choice((1, 1, 2, 6))))


def truncate(chance: random.Random, body: bytearray) -> None:
    del body[_place(chance, body) :]


def delete(chance: random.Random, body: bytearray) -> None:
    place = _place(chance, body)
    del body[place : place + chance.choice((1, 1, 2, 16))]


def duplicate(chance: random.Random, body: bytearray) -> None:
    place, length = _place(chance, body), chance.randrange(1, 33)
    body[place:place] = body[place : place + length]


def scramble(chance: random.Random, body: bytearray) -> None:
    place, length = _place(chance, body), chance.randrange(1, 17)
    body[place : place + length] = chance.randbytes(length)


def nest(chance: random.Random, body: bytearray) -> None:
    place = _place(chance, body)
    opening = chance.choice((b"\x91", b"\x81\xa1k", b"\x81\xc4\x01k", b"\xdc\x00\x01", b"\x81"))
    body[place:place] = opening * chance.choice((1, 3, 60, 1500))


def huge_length(chance: random.Random, body: bytearray) -> None:
    place = _place(chance, body)
    length = chance.choice((0x7FFFFFFF, 0xFFFFFFFF, 0x10000, 0x100))
    body[place:place] = bytes([chance.choice((0xC6, 0xC9, 0xDB, 0xDD, 0xDF))]) + length.to_bytes(4, "big")


def foreign_value(chance: random.Random, body: bytearray) -> None:
    """Replace a value by a well-formed one of another type."""
    value: object = chance.choice(
        (None, True, -1, 2**64 - 1, -(2**63), 1e308, float("nan"), "é" * 40, b"\xff" * 40, [], {}, [[]])
    )
    if chance.random() < 0.3:
        # Extensions, including timestamps, with valid and invalid lengths.
        length = chance.choice((0, 1, 4, 8, 12, 15))
        kind = chance.choice((0xFF, 0x00, 0x7F))
        packed = bytes([0xC7, length, kind]) + chance.randbytes(length)
    else:
        packed = msgspec.msgpack.encode(value)
    place = _place(chance, body)
    body[place : place + chance.choice((0, 1, 2, len(packed)))] = packed


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits, overwrite, insert, truncate, delete, duplicate, scramble, nest, huge_length, foreign_value,
)  # fmt: skip


def splice(chance: random.Random, seeds: Sequence[Sequence[bytes]]) -> bytearray:
    """Join the beginning of one message and the end of another."""
    first, second = chance.choice(seeds)[0], chance.choice(seeds)[0]
    return bytearray(first[: chance.randrange(len(first) + 1)] + second[chance.randrange(len(second)) :])


def mutate_frames(chance: random.Random, frames: list[bytes]) -> None:
    """Mutate the list of frames, not their contents."""
    match chance.randrange(4):
        case 0 if frames:
            del frames[chance.randrange(len(frames))]
        case 1:
            frames.insert(chance.randrange(len(frames) + 1), chance.randbytes(chance.randrange(64)))
        case 2 if frames:
            frames.extend(frames[-1:] * chance.choice((1, wire.MEDIA_FRAMES_MAX, 200)))
        case _:
            chance.shuffle(frames)


def frames_of(chance: random.Random, seeds: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return the frames of the next message to try."""
    origin = chance.random()
    if origin < 0.02:
        return [chance.randbytes(chance.randrange(200))]
    frames = list(chance.choice(seeds))
    body = splice(chance, seeds) if origin < 0.12 else bytearray(frames[0])
    for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
        chance.choice(MUTATIONS)(chance, body)
    frames[0] = bytes(body[:FRAME_BYTES_MAX])
    if chance.random() < 0.1:
        mutate_frames(chance, frames)
    return frames


def check(direction: str, frames: Sequence[bytes]) -> str:
    """Decode, and return the type's name or "refused". Raises `AssertionError` for anything else."""
    try:
        message, media = DECODERS[direction](frames)
    except wire.WireError:
        return "refused"
    except BaseException as error:
        raise AssertionError(f"{direction}: {type(error).__name__}: {error} from {list(frames)!r}") from error
    assert isinstance(message, _MEMBERS[direction]), f"{direction}: {message!r} from {list(frames)!r}"
    assert media == list(frames[1:])
    return type(message).__name__


def run(count: int, seed: int) -> Counter[str]:
    """Run `count` mutated messages through both decoders, and count the outcomes."""
    chance = random.Random(seed)
    seeds = golden_frames()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        frames = frames_of(chance, seeds)
        for direction in DECODERS:
            outcomes[check(direction, frames)] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="seed of the run (default: random, printed)")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    outcomes = run(asked.frames, seed)
    elapsed_s = time.monotonic() - started
    decoded = outcomes.total() - outcomes["refused"]
    print(f"{asked.frames} messages through both decoders in {elapsed_s:.1f} s", end=", ")
    print(f"{asked.frames / elapsed_s:.0f}/s: {outcomes['refused']} refused, {decoded} decoded")
    for name, times in outcomes.most_common():
        print(f"  {times:9d} {name}")


if __name__ == "__main__":
    main()
