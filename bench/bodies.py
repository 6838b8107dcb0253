"""Cost of large request bodies at the gateway: parsing time, and how long they delay other streams.

    python -m bench.bodies [--rounds 20]

For each body: milliseconds from its bytes to the worker message, in three steps (decode and check; normalize;
pack). Then the longest pause meanwhile of an event loop that wants to run every millisecond, with the work on
the loop and on a thread (`broker/server/offload.py`). Medians; of the pauses the maxima too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import uvloop

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.server.offload import LARGE_BODY_BYTES, BodyOffload
from protocol.messages import Generate

TICK_S = 0.001
TOOLS = 24
"""As many tools as Claude Code offers, in as many bytes."""


@dataclass(frozen=True)
class Case:
    """A request body. `message_bytes`: the size of each message of the conversation."""

    name: str
    conversation_bytes: int
    message_bytes: int
    tools: int = TOOLS


CASES = (
    Case("tools of 64 KB, one question", 0, 200),
    Case("the same, 100 KB of conversation", 100_000, 2_000),
    Case("1 MB, messages of 2 KB", 1_000_000, 2_000),
    Case("1 MB, messages of 200 bytes", 1_000_000, 200),
    Case("10 MB, messages of 2 KB", 10_000_000, 2_000, tools=0),
)


def body(case: Case) -> bytes:
    messages = [{"role": "system", "content": "s" * 10_000}]
    for number in range(1 + case.conversation_bytes // (2 * case.message_bytes + 200)):
        messages += _turn(number, case.message_bytes)
    tools = [_tool(number) for number in range(case.tools)]
    return json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()


def _turn(number: int, size: int) -> list[dict[str, Any]]:
    """Return a question, a tool call and its result."""
    id, arguments = f"call_{number}", json.dumps({"path": "p" * 100, "lines": [1, 200]})
    call = {"id": id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "u" * size}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "r" * size},
    ]


def _tool(number: int) -> dict[str, Any]:
    properties = {f"p{n}": {"type": "string", "description": "d" * 150} for n in range(6)}
    schema = {"$schema": "x", "type": "object", "properties": properties, "additionalProperties": False}
    function = {"name": f"tool_{number}", "description": "d" * 1_400, "parameters": schema}
    return {"type": "function", "function": function}


def steps_ms(raw: bytes) -> tuple[float, float, float]:
    """Return the milliseconds of decoding, normalizing and packing."""
    marks = [time.perf_counter()]
    read = chat_body.read(raw)
    marks.append(time.perf_counter())
    conversation = chat.conversation(read, system_in_place=True)
    marks.append(time.perf_counter())
    chat.generate(read, conversation.messages, [], id="x", incarnation="g")
    marks.append(time.perf_counter())
    first, second, third = (1e3 * (end - begin) for begin, end in pairwise(marks))
    return first, second, third


def whole(raw: bytes) -> Generate:
    read = chat_body.read(raw)
    conversation = chat.conversation(read, system_in_place=True)
    return chat.generate(read, conversation.messages, [], id="x", incarnation="g")


async def longest_pause_ms(aside: BodyOffload, counted_bytes: int, work: Callable[[], object]) -> float:
    """Return the longest pause of an event loop while `work` runs for a body declared as `counted_bytes`
    long."""
    longest, over = 0.0, asyncio.Event()

    async def tick() -> None:
        nonlocal longest
        while not over.is_set():
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            longest = max(longest, time.perf_counter() - before - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(5 * TICK_S)
    await aside.work(counted_bytes, work)
    await asyncio.sleep(5 * TICK_S)
    over.set()
    await ticking
    return 1e3 * longest


async def pauses(raw: bytes, rounds: int, counted_bytes: int) -> list[float]:
    aside = BodyOffload()
    try:
        return [await longest_pause_ms(aside, counted_bytes, partial(whole, raw)) for _ in range(rounds)]
    finally:
        aside.close()


def measure(case: Case, rounds: int) -> str:
    raw = body(case)
    taken = zip(*(steps_ms(raw) for _ in range(rounds)), strict=True)
    steps = [statistics.median(step) for step in taken]
    shown = [f"{len(raw) / 1e3:8.0f} KB", *(f"{step:8.2f}" for step in steps)]
    for counted in (0, LARGE_BODY_BYTES):
        found = uvloop.run(pauses(raw, rounds, counted))
        shown.append(f"{statistics.median(found):8.1f} ({max(found):.1f})")
    return f"{case.name:34}" + "  ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{'ms':34}       body   decoded  normalized  packed   pause: on the loop   on a thread")
    for case in CASES:
        print(measure(case, rounds), flush=True)


if __name__ == "__main__":
    main()
