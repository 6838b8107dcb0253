"""`python -m tests.faults.gateway_deaths`: kill -9 of the gateway under clients that retry with their key.

Every answer must end with the text of an undisturbed run. Prints the pauses of the clients.
"""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.retrying import DIALECTS, RetryingClient
from tests.faults.runner import run_program
from tests.faults.streams import scripted
from tests.system import System, running_system

STEP = ("--step-ms", "5", "--max-running", "64")


def kill_gateways(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """Kill the gateway `kills` times under `clients` clients, who begin anew when they have their answers."""
    rolled, wrong, ended = random.Random(given.seed), list[str](), list[RetryingClient]()
    with running_system(folder) as system:
        system.start_worker(*STEP)
        system.wait_ready()
        stop = threading.Event()
        threads = [
            threading.Thread(target=_ask_on, args=(system, number, given.tokens, stop, ended))
            for number in range(given.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(given.kills):
                stop.wait(rolled.uniform(0.2, 0.2 + given.interval))
                system.restart_gateway()
        finally:
            stop.set()
            for thread in threads:
                thread.join(180)
        wrong += [f"a client is still waiting: {thread.name}" for thread in threads if thread.is_alive()]
        left = system.http.get("/v1/status").json()["gateway"]["in_flight"]
        wrong += [f"{left} requests are left"] if left else []
    for client in ended:
        if client.wrong:
            wrong.append(f"{client.dialect} stream={client.stream}: {client.wrong}")
        elif client.text != scripted(client.prompt, given.tokens):
            wrong.append(f"{client.dialect} stream={client.stream}: another text: {client.text!r:.200}")
    pauses = sorted(pause for client in ended for pause in client.pauses)
    print(f"{len(ended)} answers, {len(pauses)} pauses", end="")
    if pauses:
        print(f", p50 {pauses[len(pauses) // 2]:.2f} s, p99 {pauses[int(len(pauses) * 0.99)]:.2f} s", end="")
    print(flush=True)
    return wrong


def _ask_on(
    system: System, number: int, tokens: int, stop: threading.Event, ended: list[RetryingClient]
) -> None:
    """Ask one question after another until `stop` is set; each answer is waited for."""
    round = 0
    while not stop.is_set():
        dialect, stream = DIALECTS[number % len(DIALECTS)], number % 2 == 0
        prompt = f"{'go ' * (1 + number % 7)}!tokens={tokens}"
        client = RetryingClient(system.url, dialect, prompt, f"client-{number}-{round}", stream=stream)
        client.run()
        ended.append(client)
        round += 1


if __name__ == "__main__":
    options: dict[str, Any] = {
        "--kills": 100,
        "--clients": 32,
        "--tokens": 150,
        "--interval": 1.0,
        "--seed": 1,
    }
    run_program(__doc__, kill_gateways, options)
