"""Gateway memory of a waiting request: about the size of its body, whatever the contents."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest

from broker.dispatch.admission import Admission
from tests.broker.application import House
from tests.broker.asgi import Exchange, until

WAITING = 2
KEPT_MAX = 2.0
"""Most bytes kept per byte of the body."""


def tools(count: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"properties": {"x": {}, "y": {}}}}}
        for n in range(count)
    ]


def small_messages(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{n}"} for n in range(count)]


FUNCTION = {"name": "f", "arguments": json.dumps({"a": [{}] * 9})}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}

BODIES: dict[str, dict[str, Any]] = {
    "calls with arguments": {"messages": [CALL, RESULT] * 300},
    "options for the template": {
        "messages": small_messages(1),
        "chat_template_kwargs": {"list": [{} for _ in range(20_000)]},
    },
    "several answers": {"messages": small_messages(1000), "tools": tools(300), "n": 4},
}


@pytest.mark.parametrize("fields", BODIES.values(), ids=BODIES)
async def test_a_request_that_waits_keeps_at_most_about_twice_its_body(fields: dict[str, Any]) -> None:
    house = House()
    line = house.line
    line.dispatcher.admission = Admission(clock=line.clock, waiting_max=1000, waiting_tokens_max=2**40)
    line.serving("w", rows=1)
    body = json.dumps({"stream": True, **fields}).encode()
    assert len(body) > 50_000

    async def ask(count: int) -> list[Exchange]:
        asked = []
        for _ in range(count):
            before = len(line.dispatcher.flights)
            # Sliced for each request: a shared body would cost nothing.
            pieces = [body[:30_000], body[30_000:]]
            asked.append(Exchange(house.app, "POST", "/v1/chat/completions", pieces))
            del pieces
            await until(lambda before=before: len(line.dispatcher.flights) > before)
        gc.collect()
        return asked

    asked = await ask(1)  # warm-up, so that one-time allocations are not counted
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        asked += await ask(WAITING)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for exchange in asked:
        exchange.leave()
        await exchange.end()
    assert (after - before) / WAITING / len(body) < KEPT_MAX
    house.close()
