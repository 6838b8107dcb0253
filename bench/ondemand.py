"""Time to first token of a model that must be loaded first, next to a loaded one: the embedded model twice.

The memory budget has room for one of the two, so each request to the other unloads one and loads one, with a
spare and without. For the loaded side, the third request to the same model counts, because a new worker's
first requests are slower.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Callable, Sequence

from bench.client import ask, client
from bench.processes import free_port, running, socket_folder, wait_for, wait_until
from bench.rivals import Server
from bench.timing import print_table
from deploy.load.samples import percentile

PROMPT = "My name is Brynhild. What is my name?"
TOKENS = 8
BUDGETS = {0: "200MB", 1: "350MB"}
"""Memory budgets by `--spare`: enough for it and one worker of the embedded model, but not for two."""
THERE = "spare is ready"


async def measure(server: Server, rounds: int, wait_for_spare: Callable[[int], None]) -> list[list[float]]:
    """Measure the seconds to the first text of a model that is not loaded, and of one that is.

    `wait_for_spare`: called before the request with this number.
    """
    unloaded: list[float] = []
    loaded: list[float] = []
    for number in range(rounds + 1):
        wait_for_spare(number)
        model = ("one", "other")[number % 2]
        async with client(server) as http:
            first, _, third = [await ask(http, server, PROMPT, TOKENS, model=model) for _ in range(3)]
        if number > 0:  # `serve` loads the first model at its start
            unloaded.append(first.first_s)
            loaded.append(third.first_s)
    return [unloaded, loaded]


def measure_side(spare: int, rounds: int) -> list[list[float]]:
    """Run `measure` on a `serve` with a spare or without."""
    port = free_port()
    with socket_folder() as folder:
        flags = ["--model=one=", "--model=other=", f"--memory-budget={BUDGETS[spare]}", f"--spare={spare}"]
        environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder), **_nothing_said()}
        log = folder / "serve.log"
        with running("deploy", ["serve", f"--port={port}", *flags], environ, log=log) as process:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/ready", process)

            def wait_for_spare(number: int) -> None:
                made = spare * max(1, number)  # all requests but the first use a spare
                wait_until(lambda: log.read_text(encoding="utf-8").count(THERE) >= made, f"no spare: {log}")

            return asyncio.run(measure(Server("roundhouse", url, process), rounds, wait_for_spare))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args(arguments).rounds
    rows = []
    for spare in BUDGETS:
        sides = measure_side(spare, rounds)
        for name, side in zip(("not loaded", "loaded"), sides, strict=True):
            figures = statistics.median(side), min(side), percentile(side, 90)
            rows.append([f"{name}, --spare {spare}", *(f"{1000 * value:,.0f}" for value in figures)])
    budgets = " and ".join(BUDGETS.values())
    legend = f"Milliseconds from a request to its first text, {rounds} of each; memory budgets {budgets}."
    print_table("Models on demand", ["the model is", "median", "least", "p90"], rows, legend)


def _nothing_said() -> dict[str, str]:
    """Return an environment that clears our own variables."""
    return {name: "" for name in os.environ if name.startswith("ROUNDHOUSE_")}


if __name__ == "__main__":
    main()
