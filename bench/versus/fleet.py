"""All sides running at once; those that do not start are listed with their reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.processes import kill_tree
from bench.rivals import Server, server
from bench.versus.turns import TROUBLES, Taken, Values, describe, take_turns


@dataclass
class Fleet:
    """The running servers. `missing`: why the others did not start."""

    up: list[Server] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def take_turns(self, turn: Callable[[Server, int], Values], rounds: int) -> dict[str, Taken]:
        """Run `turns.take_turns`; servers that are not running have only a note. One that fails is killed,
        since its remaining requests would disturb the others."""
        missing = {name: Taken(note=reason) for name, reason in self.missing.items()}
        turns = {each.name: partial(_guarded, turn, each) for each in self.up}
        taken = take_turns(turns, rounds) if turns else {}
        for one in list(self.up):
            if (reason := taken[one.name].note) is not None:
                self.up.remove(one)
                self.missing[one.name] = reason
        return taken | missing


def _guarded(turn: Callable[[Server, int], Values], server: Server, number: int) -> Values:
    try:
        return turn(server, number)
    except TROUBLES:
        kill_tree(server.process)
        raise


@contextlib.contextmanager
def fleet(folder: Path, names: Sequence[str], rows_max: int, *, reuse: bool = False) -> Iterator[Fleet]:
    """Run the named servers. They start concurrently, and wait on a queue when idle."""
    found = Fleet()
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(names)) as pool:
            starting = {
                name: (each := server(name, folder, rows_max, reuse=reuse), pool.submit(each.__enter__))
                for name in names
            }
        for name, (each, started) in starting.items():
            try:
                found.up.append(started.result())
            except TROUBLES as error:
                found.missing[name] = describe(error)
            else:
                stack.push(each)
        yield found
