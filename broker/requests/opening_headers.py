"""Response headers from the flights: `x-roundhouse-cache` and `x-roundhouse-schema-relaxed`. Pure.

The first says how much of the prompt came from the prefix cache:

    x-roundhouse-cache: hit=1500/1540; tier=ram; miss=diverged_at_1500

`hit`: cached tokens / prompt tokens. `tier`: where they were stored: `ram`, `disk` (at least some of them) or
`none`. `miss`: why no more was cached, one word of letters, digits and `_.:-`; `none` if everything was,
`unreported` if the worker gives no reason. For several prompts the numbers are sums, and `miss` is that of
the first prompt that has one. `message`: the message in which the prompt of a conversation that goes on
diverges, with its role, such as `0:system`, if it does. `sparse`: number of prompt tokens that sparse prefill
skipped, if any. As in `usage`, a prompt with several choices counts once.

The second names the keywords of the request's JSON schema that the answer may violate, because they cannot be
enforced; it is absent if the answer matches the whole schema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from broker.dispatch.flight import Flight
from protocol.messages import Finished, Generate
from protocol.tasks import runs_nothing
from protocol.types import PrefixReuse

CACHE_HEADER = b"x-roundhouse-cache"
RELAXED_HEADER = b"x-roundhouse-schema-relaxed"
UNREPORTED = "unreported"
MISS_CHARACTERS_MAX = 64

_NOT_IN_A_WORD = re.compile(r"[^A-Za-z0-9_.:-]")


def opening_headers(prompts: int, flights: Sequence[Flight]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return the headers that flights add to their response, and whether the prefix cache has reported."""
    headers: list[tuple[bytes, bytes]] = []
    if (cache := cache_header(flights, prompts)) is not None:
        headers.append((CACHE_HEADER, cache))
    if relaxed := sorted({keyword for flight in flights for keyword in flight.relaxed}):
        headers.append((RELAXED_HEADER, ", ".join(relaxed).encode()))
    return headers, cache is not None


def cache_header(flights: Sequence[Flight], prompts: int) -> bytes | None:
    """Return the cache header's value for the flights of one request: equally many for each prompt, in order.

    None until it is known for every prompt, and for requests that never use the cache.
    """
    if not all(isinstance(flight.request, Generate) for flight in flights):
        return None
    each = len(flights) // prompts
    groups = [_group(flights[first : first + each]) for first in range(0, len(flights), each)]
    known = [group for group in groups if group is not None]
    if len(known) < prompts:
        return None
    hit = sum(reuse.tokens for reuse, _ in known)
    total = sum(prompt_tokens for _, prompt_tokens in known)
    tiers = {reuse.tier for reuse, _ in known}
    tier = next((tier for tier in ("disk", "ram") if tier in tiers), "none")
    missed = next((reuse for reuse, _ in known if reuse.miss), PrefixReuse(miss="none"))
    report = f"hit={hit}/{total}; tier={tier}; miss={_word(missed.miss)}"
    if missed.message is not None:
        report += f"; message={missed.message}:{_word(missed.role)}"
    sparse = sum(reuse.sparse_tokens for reuse, _ in known)
    return f"{report}; sparse={sparse}".encode() if sparse else report.encode()


def _group(flights: Sequence[Flight]) -> tuple[PrefixReuse, int] | None:
    """Return reuse and prompt tokens of one prompt: of the choice with the least reuse, which the others
    copy."""
    known = [found for flight in flights if (found := _of(flight)) is not None]
    return min(known, key=lambda found: found[0].tokens, default=None)


def _of(flight: Flight) -> tuple[PrefixReuse, int] | None:
    if runs_nothing(flight.request):
        return None  # no forward pass, so no reuse
    if flight.reuse is not None:
        return flight.reuse, flight.prompt_tokens
    if isinstance(flight.terminal, Finished):
        usage = flight.terminal.usage
        return PrefixReuse(tokens=usage.cached_tokens, miss=UNREPORTED), usage.prompt_tokens
    return None


def _word(miss: str) -> str:
    return _NOT_IN_A_WORD.sub("_", miss)[:MISS_CHARACTERS_MAX]
