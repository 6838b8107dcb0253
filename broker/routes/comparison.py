"""Comparison of a request's prompt with that of an earlier answer, for cache diagnostics."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from broker.dispatch.prompt_records import PromptComparison, compare, record_of
from broker.routes.generation import Within
from broker.routes.state import gateway_of, owner_of
from protocol.messages import Generate


async def compared(
    request: Request, asked: Generate, model: str, body_bytes: int, earlier: str | None
) -> tuple[PromptComparison | None, Within]:
    """Record a prompt, and compare it with that of the answer with the id `earlier`.

    Returns the comparison (None: the answer is not known), and what keeps the record once there is a flight.
    """
    gateway, owner = gateway_of(request), owner_of(request)
    record = await gateway.offload.work(body_bytes, partial(record_of, model, asked))
    before = gateway.prompt_records.get(owner, earlier) if earlier else None
    comparison = None if before is None else compare(before, record)
    return comparison, partial(gateway.prompt_records.recording, owner, asked.id, record)
