"""`python -m tests.faults.gateway_deaths`: kill -9 of the gateway under clients that retry with their key.

Every answer must end with the text of an undisturbed run. Prints the pauses of the clients, and the tokens
that the worker computed for an answer over those without a kill.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.retrying import DIALECTS, RetryingClient
from tests.faults.runner import run_program
from tests.faults.streams import scripted
from tests.scripted_worker.tally import TokenTally
from tests.system import System, running_system

STEP = ("--step-ms", "5", "--max-running", "64")


def kill_gateways(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """Kill the gateway `kills` times under `clients` clients, who begin anew when they have their answers."""
    rolled, wrong, tally = random.Random(given.seed), list[str](), folder / "tally"
    failovers = Counter[str]()
    with running_system(folder) as system:
        system.start_worker(*STEP, "--tally", str(tally))
        system.wait_ready()
        undisturbed, _ = _ask(system, given, "undisturbed", lambda stop: stop.set())
        before = TokenTally.read(tally)

        def kill(stop: threading.Event) -> None:
            for _ in range(given.kills):
                stop.wait(rolled.uniform(0.2, 0.2 + given.interval))
                failovers.update(_failovers(system))
                system.restart_gateway()

        ended, waiting = _ask(system, given, "killed", kill)
        wrong += [f"{waiting} clients are still waiting"] if waiting else []
        left = system.http.get("/v1/status").json()["gateway"]["in_flight"]
        wrong += [f"{left} requests are left"] if left else []
        after = TokenTally.read(tally)
        failovers.update(_failovers(system))
    for client in ended:
        if client.wrong:
            wrong.append(f"{client.dialect} stream={client.stream}: {client.wrong}")
        elif client.text != scripted(client.prompt, given.tokens):
            wrong.append(f"{client.dialect} stream={client.stream}: another text: {client.text!r:.200}")
    _tell_pauses(ended)
    _tell_tokens(before, len(undisturbed), after, len(ended))
    print(f"requests {failovers['restored']} restored, of which {failovers['adopted']} adopted")
    return wrong


def _failovers(system: System) -> dict[str, int]:
    """Return what the gateway has counted: requests that the journal had, and rows that went on."""
    counts: dict[str, int] = system.http.get("/v1/status").json()["gateway"]["failover"]
    return counts


def _tell_pauses(ended: Sequence[RetryingClient]) -> None:
    pauses = sorted(pause for client in ended for pause in client.pauses)
    print(f"{len(ended)} answers, {len(pauses)} pauses", end="")
    if pauses:
        print(f", p50 {pauses[len(pauses) // 2]:.2f} s, p99 {pauses[int(len(pauses) * 0.99)]:.2f} s", end="")
    print(flush=True)


def _tell_tokens(before: TokenTally, undisturbed: int, after: TokenTally, ended: int) -> None:
    """Print the tokens that the worker computed for each answer, over those of an undisturbed one."""
    for name in ("sampled", "prefilled"):
        alone = getattr(before, name) / undisturbed
        each = (getattr(after, name) - getattr(before, name)) / ended
        print(f"tokens {name} for an answer: {each:.2f}, undisturbed {alone:.2f}, ratio {each / alone:.4f}")


def _ask(
    system: System, given: argparse.Namespace, name: str, disturb: Callable[[threading.Event], None]
) -> tuple[list[RetryingClient], int]:
    """Run clients until `disturb` has returned. Return them, and the number of those without an answer."""
    stop, ended = threading.Event(), list[RetryingClient]()
    threads = [
        threading.Thread(target=_ask_on, args=(system, f"{name}-{number}", number, given.tokens, stop, ended))
        for number in range(given.clients)
    ]
    for thread in threads:
        thread.start()
    try:
        disturb(stop)
    finally:
        stop.set()
        for thread in threads:
            thread.join(180)
    return ended, sum(thread.is_alive() for thread in threads)


def _ask_on(
    system: System, name: str, number: int, tokens: int, stop: threading.Event, ended: list[RetryingClient]
) -> None:
    """Ask one question after another, at least one, until `stop` is set; each answer is waited for."""
    for round in itertools.count():
        dialect, stream = DIALECTS[number % len(DIALECTS)], number % 2 == 0
        prompt = f"{'go ' * (1 + number % 7)}!tokens={tokens}"
        client = RetryingClient(system.url, dialect, prompt, f"{name}-{round}", stream=stream)
        client.run()
        ended.append(client)
        if stop.is_set():
            return


if __name__ == "__main__":
    options: dict[str, Any] = {
        "--kills": 100,
        "--clients": 32,
        "--tokens": 150,
        "--interval": 1.0,
        "--seed": 1,
    }
    run_program(__doc__, kill_gateways, options)
