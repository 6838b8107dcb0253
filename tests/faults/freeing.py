"""Time until a row is free after its client disconnects, on a worker with one row and a waiting request."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from tests.faults.raw import CHAT, Connection, Pool, on_uvloop, post
from tests.system import System, chat_body, running_system

STEP_MS, CHUNK_MS = 100, 300
UNITS_MAX = 1.25
"""The limit: one step or chunk, plus the latency of a message through three processes."""


async def freed_after(system: System, text: str, unit_s: float, tries: int, seed: int) -> list[float]:
    """Measure the time from the disconnect of a client until a waiting request has its row.

    Times are in units of `unit_s`, a step or a chunk. The first steps of the waiting request itself are
    measured on an idle worker and subtracted. `text` must run longer than a unit and than half a second.
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


def measure(folder: Path, tries: int, seed: int) -> list[str]:
    """Print how soon rows are free, and return the times beyond the limit."""
    late = []
    with running_system(folder) as system:
        system.start_worker("--step-ms", str(STEP_MS), "--max-running", "1")
        system.wait_ready()
        prefill = "go " * 8000 + f"!prefill={CHUNK_MS} !tokens=5"
        for name, text, unit_ms in (("step", "!tokens=500", STEP_MS), ("chunk", prefill, CHUNK_MS)):
            units = on_uvloop(freed_after(system, text, unit_ms / 1000, tries, seed))
            median, most = units[len(units) // 2], units[-1]
            told = f"a row is free {median:.2f} {name}s after its client left, {most:.2f} at most of {tries}"
            print(told)
            late += [told] if most > UNITS_MAX else []
    return late
