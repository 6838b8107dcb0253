"""What calls are called towards clients."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable

from worker.contract import Prepared

ID_DIGITS = 24


def namer_of(prepared: Prepared) -> Callable[[int], str]:
    """Names for calls, by their number: the same wherever the answer goes on, and others with every prompt.

    Not by the request's id: what goes on elsewhere has another one there.
    """
    tokens = prepared.tokens

    @functools.cache
    def asked() -> bytes:
        return hashlib.sha256(array("q", [prepared.draw.seed, *tokens]).tobytes()).digest()

    return lambda index: "call_" + hashlib.sha256(asked() + index.to_bytes(4, "big")).hexdigest()[:ID_DIGITS]
