"""Factories of protocol messages and engine requests. Every field has a default, which a keyword replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw

from protocol.conversation import pack
from protocol.messages import (
    Accepted,
    CacheCleared,
    Embed,
    EmbeddingChunk,
    Failed,
    Finished,
    Generate,
    PrefixHit,
    StepOutputs,
)
from protocol.types import Delta, PrefixReuse, Sampling, Usage
from worker.values import EngineRequest, SamplingParams

GATEWAY = "gateway"
PACKED = {"messages", "tools", "template_kwargs"}
PROMPTS = {"messages", "prompt", "tokens"}


# --- from the gateway ---


def request(id: str = "a", **fields: Any) -> Generate:
    """Return a generation request with the prompt "x" or another one. Conversations are packed here."""
    for name in PACKED & fields.keys():
        if not isinstance(fields[name], Raw):
            fields[name] = UNSET if fields[name] is None else pack(fields[name])
    if not PROMPTS & fields.keys():
        fields["prompt"] = "x"
    return Generate(**{"incarnation": GATEWAY, "id": id, "sampling": Sampling(seed=1), **fields})


def embed(texts: Sequence[Any] = ("a",), id: str = "a", **fields: Any) -> Embed:
    return Embed(
        **{"incarnation": GATEWAY, "id": id, "texts": pack(list(texts)), "count": len(texts), **fields}
    )


# --- from a worker ---


def accepted(worker: str = "w", id: str = "a", **fields: Any) -> Accepted:
    return Accepted(**{"incarnation": worker, "id": id, "prompt_tokens": 3, **fields})


def reused(
    worker: str = "w", id: str = "a", tokens: int = 0, tier: str = "none", miss: str = "cold"
) -> PrefixHit:
    return PrefixHit(incarnation=worker, id=id, reuse=PrefixReuse(tokens=tokens, tier=tier, miss=miss))


def cleared(worker: str, id: str, ram_bytes: int = 0, disk_bytes: int = 0) -> CacheCleared:
    return CacheCleared(incarnation=worker, id=id, ram_bytes=ram_bytes, disk_bytes=disk_bytes)


def delta(text: str = "", id: str = "a", **fields: Any) -> Delta:
    return Delta(**{"id": id, "sequence": 0, "tokens": [1], "text": text, **fields})


def events(worker: str, id: str, *texts: str, first: int = 0) -> StepOutputs:
    """Return one message with one token for each text."""
    deltas = [delta(text, id, sequence=first + n, tokens=[n]) for n, text in enumerate(texts)]
    return StepOutputs(incarnation=worker, deltas=deltas)


def encoded(
    sequence: int, places: Sequence[int], vectors: bytes, worker: str = "w", id: str = "a"
) -> EmbeddingChunk:
    return EmbeddingChunk(incarnation=worker, id=id, sequence=sequence, places=list(places), vectors=vectors)


def finished(
    worker: str = "w", id: str = "a", tokens: int = 0, cached: int = 0, *, prompt: int = 3, **fields: Any
) -> Finished:
    usage = Usage(prompt_tokens=prompt, completion_tokens=tokens, cached_tokens=cached)
    return Finished(**{"incarnation": worker, "id": id, "reason": "stop", "usage": usage, **fields})


def failed(worker: str = "w", id: str = "a", code: str = "engine_error", **fields: Any) -> Failed:
    return Failed(**{"incarnation": worker, "id": id, "code": code, "message": "", **fields})


# --- for the model thread ---


def engine_request(id: str = "a", tokens: int | Sequence[int] = 1, **fields: Any) -> EngineRequest:
    """Return a greedy request. `tokens`: the prompt, or its length; each token is then its position."""
    prompt = tuple(range(tokens) if isinstance(tokens, int) else tokens)
    given: dict[str, Any] = {
        "sampling": SamplingParams(),
        "stop": (),
        "max_tokens": 9,
        "end_tokens": frozenset(),
    }
    return EngineRequest(id, prompt, **given | fields)
