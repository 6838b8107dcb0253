"""The row of a client that disconnects is free at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.raw import CHAT, Pool, on_uvloop, post
from tests.system import System, chat_body, running_system


async def leave_to_another(system: System, text: str) -> None:
    """Disconnect a client from the only row, for which another one waits; that must have its answer."""
    pool = Pool(system.port)
    for stream in (False, True):
        gone, next_one = await pool.open(), await pool.open()
        answer = gone.ask(post(CHAT, chat_body(text, stream=stream)))
        answer.add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.1)
        waiting = next_one.ask(post(CHAT, chat_body("!tokens=1 !text=first", stream=True)))
        await asyncio.sleep(0.02)
        gone.abort()
        assert b'"content":"first"' in (await waiting).body
    await pool.close()


def test_a_row_is_another_s_once_its_client_has_gone(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_ready_worker("--step-ms", "20", "--max-running", "1")
        for text in ("!tokens=5000", "go " * 8000 + "!prefill=100 !tokens=5"):
            # If its row were not freed, each request would occupy it longer than the timeout.
            on_uvloop(leave_to_another(system, text))
        assert system.gateway.log().count("client left after") == 4
