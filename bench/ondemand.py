"""The first token of a model that must be loaded first, beside that of one that is: the embedded model twice.

The memory budget has room for one of the two, so each question to the other unloads one and loads one. Of the
loaded side, the second question to the same model counts: the first has found a worker that had just begun.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence

from bench.client import ask, client
from bench.processes import free_port, running, socket_folder, wait_for
from bench.rivals import Server
from bench.timing import percentile, print_table

PROMPT = "My name is Brynhild. What is my name?"
TOKENS = 8
BUDGET = "310MB"
"""More than one worker of the embedded model takes beside the spare, and less than two."""


async def measure(server: Server, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to the first text: of a model that is not loaded, and of one that is."""
    unloaded: list[float] = []
    loaded: list[float] = []
    for number in range(rounds + 1):
        model = ("one", "other")[number % 2]
        async with client(server) as http:
            first, _, third = [await ask(http, server, PROMPT, TOKENS, model=model) for _ in range(3)]
        if number > 0:  # the first model was loaded when `serve` began
            unloaded.append(first.first_piece_s)
            loaded.append(third.first_piece_s)
    return unloaded, loaded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args(arguments).rounds
    port = free_port()
    with socket_folder() as folder:
        flags = ["serve", "--model=one=", "--model=other=", f"--port={port}", f"--memory-budget={BUDGET}"]
        environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder), **_nothing_said()}
        with running("deploy", flags, environ, silent=True) as process:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/ready", process)
            unloaded, loaded = asyncio.run(measure(Server("roundhouse", url, process), rounds))
    rows = [
        [
            name,
            *(f"{1000 * value:,.0f}" for value in (statistics.median(side), min(side), percentile(side, 90))),
        ]
        for name, side in (("not loaded", unloaded), ("loaded", loaded))
    ]
    legend = f"Milliseconds from a request to its first text, {rounds} of each; memory budget {BUDGET}."
    print_table("Models on demand", ["the model is", "median", "least", "p90"], rows, legend)


def _nothing_said() -> dict[str, str]:
    """Our own variables have no say here."""
    return {name: "" for name in os.environ if name.startswith("ROUNDHOUSE_")}


if __name__ == "__main__":
    main()
