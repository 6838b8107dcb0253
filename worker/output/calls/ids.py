"""Ids of tool calls, as clients see them."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable

from worker.contract.engine import EngineRequest

ID_DIGITS = 24


def namer_of(engine_request: EngineRequest) -> Callable[[int], str]:
    """Return a function from a call's number to its id, which depends on the seed and the prompt only.

    The request's id is not used: a request that continues on another worker has a different one there.
    """
    tokens = engine_request.tokens

    @functools.cache
    def asked() -> bytes:
        return hashlib.sha256(array("q", [engine_request.sampling.seed, *tokens]).tobytes()).digest()

    return lambda index: "call_" + hashlib.sha256(asked() + index.to_bytes(4, "big")).hexdigest()[:ID_DIGITS]
