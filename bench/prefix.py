"""Memory growth and lookup time of the prefix-cache index alone.

    python -m bench.prefix [--requests 100000] [--prompt-tokens 32768] [--seed 0]

Random conversations of several tenants grow, branch, are truncated and return. Each request does a lookup and
stores its new tokens in blocks; both tiers are limited to far less than the total. Memory allocated by Python
is sampled; a slope is in bytes per request, without the first fifth. Then a long prompt is looked up, as the
stored tuple itself and as equal new integers, whose comparison costs more.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from bench.timing import fit_slope, print_table
from deploy.load.samples import percentile
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.tree import Item
from worker.values import CacheSpec

SALTS = ("", "tenant", "another")
BLOCK_TOKENS = 512
TOKEN_BYTES = 2_000
STATE_BYTES = 2_000_000
RAM_BYTES = 300_000_000
DISK_BYTES = 600_000_000
CONVERSATIONS = 60
SYSTEM_TOKENS = 300
TURN_TOKENS = (10, 700)
LONGEST_TOKENS = 6_000
SAMPLES = 100
WARM_PART = 0.2
LOOKUPS = 300

Keys = tuple[int, ...]


class Traffic:
    """Requests against an index, from a seed."""

    def __init__(self, seed: int) -> None:
        self.index = PrefixIndex(CacheSpec(window=1024, has_states=True))
        self.ram_bytes_most = self.disk_bytes_most = 0
        self._random = random.Random(seed)
        self._systems = [self._tokens(SYSTEM_TOKENS) for _ in range(4)]
        self._conversations = [self._opening() for _ in range(CONVERSATIONS)]

    def request(self) -> None:
        """Send one turn of a conversation, sometimes of one that starts anew or branches from another."""
        number = self._random.randrange(CONVERSATIONS)
        keys = self._conversations[number]
        fate = self._random.random()
        if fate < 0.1 or len(keys) > LONGEST_TOKENS:
            keys = self._opening()
        elif fate < 0.2:
            other = self._random.choice(self._conversations)
            keys = other[: self._random.randrange(len(other))]
        keys = self._conversations[number] = keys + self._tokens(self._random.randint(*TURN_TOKENS))
        self._serve(keys, SALTS[number % len(SALTS)])

    def _serve(self, keys: Keys, salt: str) -> None:
        index = self.index
        match = index.find(keys, salt=salt, limit=len(keys) - 1)
        index.hold(match.items)
        for item in match.missing:
            index.loaded(item, bytes(1), TOKEN_BYTES)
        index.count(match, prompt_tokens=len(keys), miss=match.miss)
        stored = self._store(keys, salt)
        index.release(match.items)
        for item in stored:
            if self._random.random() < 0.9:  # the disk's queue is sometimes full
                index.to_disk(item, item.nbytes)
        index.shrink_ram(RAM_BYTES)
        index.shrink_disk(DISK_BYTES)
        self.ram_bytes_most = max(self.ram_bytes_most, index.ram_bytes)
        self.disk_bytes_most = max(self.disk_bytes_most, index.disk_bytes)

    def _store(self, keys: Keys, salt: str) -> list[Item]:
        known, has_snapshot = self.index.reach(keys, salt=salt, end=len(keys))
        stored: list[Item] = []
        for first in range(known, len(keys), BLOCK_TOKENS):
            last = min(first + BLOCK_TOKENS, len(keys))
            size = TOKEN_BYTES * (last - first)
            stored.append(self.index.add(keys, first, last, bytes(1), size, salt=salt, window_from=first))
        if not has_snapshot:
            stored.append(self.index.add_snapshot(keys, len(keys), bytes(1), STATE_BYTES, salt=salt))
        if known < SYSTEM_TOKENS < len(keys):
            stored.append(self.index.add_snapshot(keys, SYSTEM_TOKENS, bytes(1), STATE_BYTES, salt=salt))
        return stored

    def _opening(self) -> Keys:
        return self._random.choice(self._systems) + self._tokens(20)

    def _tokens(self, count: int) -> Keys:
        return tuple(self._random.choices(range(150_000), k=count))


def soak(requests: int, seed: int) -> None:
    """Print whether memory grows, and that the limits are respected."""
    traffic = Traffic(seed)
    tracemalloc.start()
    samples: list[tuple[float, float]] = []
    began = time.perf_counter()
    for number in range(1, requests + 1):
        traffic.request()
        if number % max(1, requests // SAMPLES) == 0:
            samples.append((number, tracemalloc.get_traced_memory()[0]))
    took = time.perf_counter() - began
    tracemalloc.stop()
    settled = samples[int(WARM_PART * len(samples)) :]
    slope = fit_slope([x for x, _ in settled], [y for _, y in settled])
    status = traffic.index.status()
    print_table(
        f"{requests} requests, {took / requests * 1e3:.2f} ms each while memory is traced",
        ("of the index", "value"),
        [
            ("memory allocated at the end of the warm-up, at the end, MB", _pair(settled)),
            ("slope, bytes per request", f"{slope.rise:+.1f} ± {slope.margin:.1f}"),
            ("most in memory, of the limit", f"{traffic.ram_bytes_most / RAM_BYTES:.3f}"),
            ("most on the disk, of the limit", f"{traffic.disk_bytes_most / DISK_BYTES:.3f}"),
            ("blocks, snapshots", f"{status.blocks}, {status.snapshots}"),
            ("cached share of all prompt tokens", f"{status.reused_tokens / status.prompt_tokens:.3f}"),
            ("misses", ", ".join(f"{name} {count}" for name, count in sorted(status.misses.items()))),
        ],
        "Memory includes the conversations themselves.",
    )


def lookups(prompt_tokens: int, seed: int) -> None:
    """Print the lookup time of a long prompt, and of one that diverges from it."""
    sampling = random.Random(seed)
    numbers = sampling.choices(range(150_000), k=prompt_tokens)
    keys = tuple(numbers)
    index = PrefixIndex(CacheSpec(window=1024, has_states=True))
    for first in range(0, prompt_tokens, BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, prompt_tokens)
        index.add(keys, first, last, bytes(1), TOKEN_BYTES, window_from=first)
        index.add_snapshot(keys, last, bytes(1), STATE_BYTES)
    anew = tuple(int(str(number)) for number in numbers)
    parting = (*anew[:-100], 150_000, *anew[-99:])
    rows = [
        (name, *_milliseconds(partial(index.find, prompt, limit=prompt_tokens, ram_only=True)))
        for name, prompt in {
            "the stored tuple": keys,
            "equal numbers": anew,
            "a prompt that diverges 100 tokens before the end": parting,
        }.items()
    ]
    rows.append(("reach, equal numbers", *_milliseconds(partial(index.reach, anew, end=prompt_tokens))))
    print_table(
        f"Lookup of {prompt_tokens} tokens in blocks of {BLOCK_TOKENS}, ms",
        ("prompt", "median", "99%"),
        rows,
        "Aim: below 2 ms.",
    )


def _milliseconds(work: Callable[[], object]) -> tuple[str, str]:
    taken = []
    for _ in range(LOOKUPS):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1e3)
    return f"{percentile(taken, 50):.3f}", f"{percentile(taken, 99):.3f}"


def _pair(samples: list[tuple[float, float]]) -> str:
    return f"{samples[0][1] / 1e6:.1f}, {samples[-1][1] / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lookups(options.prompt_tokens, options.seed)
    soak(options.requests, options.seed)


if __name__ == "__main__":
    main()
