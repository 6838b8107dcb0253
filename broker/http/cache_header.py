"""What was reused of a request's prompt, as its response says it. Pure.

    x-roundhouse-cache: hit=1500/1540; tier=ram; miss=diverged

`hit`: so many tokens of the prompt, of so many, had been computed before. `tier`: where they were, `ram`,
`disk` (some of them at least) or `none`. `miss`: why it was not more, one word of letters, digits and `_.:-`;
`none` where nothing was left, `unreported` where the worker does not say. Of several prompts the numbers are
sums, and `miss` is that of the first prompt that has one. `sparse`: so many tokens
were left out of it, if any were. As in `usage`, a prompt with several answers counts once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from broker.dispatch.flight import Flight
from protocol.messages import Finished, Generate
from protocol.parts import Reuse
from protocol.tasks import runs_nothing

HEADER = b"x-roundhouse-cache"
UNREPORTED = "unreported"
MISS_CHARACTERS_MAX = 64

_NOT_IN_A_WORD = re.compile(r"[^A-Za-z0-9_.:-]")


def header(flights: Sequence[Flight], prompts: int) -> bytes | None:
    """The header's value for the flights of one request: those of each prompt side by side, equally many.

    None as long as it is not known for every prompt, and where nothing is ever reused.
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
    miss = next((reuse.miss for reuse, _ in known if reuse.miss), "none")
    told = f"hit={hit}/{total}; tier={tier}; miss={_word(miss)}"
    sparse = sum(reuse.sparse_tokens for reuse, _ in known)
    return f"{told}; sparse={sparse}".encode() if sparse else told.encode()


def _group(flights: Sequence[Flight]) -> tuple[Reuse, int] | None:
    """Reuse and prompt tokens of one prompt: of the answer that found least, the source of its copies."""
    known = [found for flight in flights if (found := _of(flight)) is not None]
    return min(known, key=lambda found: found[0].tokens, default=None)


def _of(flight: Flight) -> tuple[Reuse, int] | None:
    if runs_nothing(flight.request):
        return None  # so nothing could be reused
    if flight.reuse is not None:
        return flight.reuse, flight.prompt_tokens
    if isinstance(flight.terminal, Finished):
        usage = flight.terminal.usage
        return Reuse(tokens=usage.cached_tokens, miss=UNREPORTED), usage.prompt_tokens
    return None


def _word(miss: str) -> str:
    return _NOT_IN_A_WORD.sub("_", miss)[:MISS_CHARACTERS_MAX]
