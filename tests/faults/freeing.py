"""How soon a row is free when its client goes. A worker has one row, and somebody else waits for it."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from tests.faults.raw import CHAT, Connection, Pool, on_uvloop, post
from tests.system import System, chat_body, running_system

STEP_MS, CHUNK_MS = 100, 300
UNITS_MAX = 1.25
"""A step or a chunk, and what a message takes through three processes."""


async def freed_after(system: System, text: str, unit_s: float, tries: int, seed: int) -> list[float]:
    """From when the client of a request goes until its row is another's; in units, a step or a chunk.

    The other's own first steps are measured on an idle worker, and left out. `text` is at work for longer
    than a unit, and for at least half a second.
    """
    pool, dice = Pool(system.port), random.Random(seed)
    found = []
    own_s = []
    for _ in range(3):
        began = time.perf_counter()
        own_s.append(await _first_event_at(await pool.open()) - began)
    for number in range(tries):
        gone, next_one = await pool.open(), await pool.open()
        answer = gone.ask(post(CHAT, chat_body(text, stream=number % 2 == 0)))
        answer.add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.1 + dice.uniform(0, unit_s))
        waiting = asyncio.create_task(_first_event_at(next_one))
        await asyncio.sleep(dice.uniform(0.05, unit_s))
        gone_at = time.perf_counter()
        gone.abort()
        found.append((await waiting - gone_at - sorted(own_s)[1]) / unit_s)
    await pool.close()
    return sorted(found)


async def _first_event_at(connection: Connection) -> float:
    whole = connection.ask(post(CHAT, chat_body("!tokens=1 !text=first", stream=True)))
    await connection.has_received(b'"content":"first"')
    came_at = time.perf_counter()
    await whole
    return came_at


def measure(folder: Path, tries: int, seed: int) -> bool:
    """Prints how soon rows are free; whether that is soon enough."""
    soon = True
    with running_system(folder) as system:
        system.start_worker("--step-ms", str(STEP_MS), "--max-running", "1")
        system.wait_ready()
        prefill = "go " * 8000 + f"!prefill={CHUNK_MS} !tokens=5"
        for name, text, unit_ms in (("step", "!tokens=500", STEP_MS), ("chunk", prefill, CHUNK_MS)):
            units = on_uvloop(freed_after(system, text, unit_ms / 1000, tries, seed))
            median, most = units[len(units) // 2], units[-1]
            print(
                f"a row is free {median:.2f} {name}s after its client went, {most:.2f} at the most of {tries}"
            )
            soon = soon and most <= UNITS_MAX
    return soon
