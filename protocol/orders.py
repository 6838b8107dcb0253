"""What a supervisor and the gateway under it say to each other; `orderline` is what it goes down.

The supervisor tells which models there are and how they stand (`Roster`), the gateway which of them are to
run and what it sees of their workers (`Orders`). Each says all there is to say and takes the place of those
before it: one that is skipped is no loss, and a gateway that is started anew need not know what was.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Stage = Literal["parked", "running", "ending", "failed"]
"""Of a model's processes: none; one runs, loads, or is about to be started again; one is told to end; none,
and the next is not started for a while, since the last ones could not be kept alive."""

Word = Literal["there", "taken", "loaded"]
"""What the process of a worker says of itself, on a line of its own (`startline`): a spare that it is there,
then that it has taken what it was told; a worker that its model is loaded."""


class ModelState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is configured, and its processes.

    `weight_bytes`: the size of its weight files; None: they are not on this machine. `memory_bytes`: what its
    processes hold. `leaving`: those, by id, that end as soon as their requests have, and take no more.
    `restarts`: how often a process of it ended that was not told to, `last_end` how the last one did, and
    `last_end_reason` the same as a code: `sigkill`, `exit_1`, `not_started`. `replicas`: how many
    workers it has.
    """

    name: str
    stage: Stage = "parked"
    aliases: list[str] = []
    resident: bool = False
    weight_bytes: int | None = None
    memory_bytes: int = 0
    leaving: list[int] = []
    restarts: int = 0
    last_end: str = ""
    last_end_reason: str = ""
    replicas: int = 1


class Roster(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the supervisor. `on_demand`: models run as `Orders.wanted` says, else all of them do."""

    models: list[ModelState]
    on_demand: bool = False
    memory_budget: int | None = None


class Orders(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the gateway. `wanted`: the models that are to run, by name; None: as they do. `serving`: workers
    that are ready, by process id. `idle`: those of `leaving` that have nothing left to do."""

    wanted: list[str] | None = None
    serving: list[int] = []
    idle: list[int] = []
