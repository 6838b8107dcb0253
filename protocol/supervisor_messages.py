"""Messages between a supervisor and its gateway, sent over a `Channel`.

The supervisor sends the models and their states (`ModelStates`); the gateway sends which of them shall run,
and the states of their workers (`DesiredModels`). Each message is complete and replaces those before it, so
messages may be skipped, and a restarted gateway needs no history.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocol.tasks import Task

Stage = Literal["parked", "running", "ending", "failed"]
"""State of a model's processes: none; one runs, loads or is about to be restarted; one is stopping; none, and
the next start is delayed because the last ones failed."""

Word = Literal["there", "taken", "loaded"]
"""A worker process's message on its spawn channel: a spare is waiting, a spare has received its command line,
a worker has loaded its model."""


class ModelState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A configured model and its processes.

    `weight_bytes`: size of its weight files; None: they are not on this machine. `memory_bytes`: memory of
    its processes. `leaving`: ids of processes that accept no new requests and end when theirs finish.
    `restarts`: number of unexpected exits; `last_end`: a description of the last one; `last_end_reason`: its
    code (“sigkill”, “exit_1”, “not_started”). `replicas`: number of workers. `failure`: why the last start
    failed, in a sentence; empty once the model is loaded. `loaded`: a worker that runs has loaded it.
    `task`: what it is made for, known before it is loaded; None: its files are not on this machine.
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
    failure: str = ""
    loaded: bool = False
    task: Task | None = None


PULLS_MAX = 4
"""Maximum number of downloads that the gateway orders at once; further ones are refused."""

PullStage = Literal["running", "done", "failed"]


class Pull(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An order to download a model from the hub. `id`: of this order; `model`: as OWNER/NAME."""

    id: str
    model: str


class PullState(Pull, frozen=True, kw_only=True, omit_defaults=True):
    """A download. `done_bytes` of `total_bytes`, the latter 0 until it is known. `failure`: a sentence."""

    stage: PullStage = "running"
    done_bytes: int = 0
    total_bytes: int = 0
    failure: str = ""


class ModelStates(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Observed state, from the supervisor. `on_demand`: only `DesiredModels.wanted` run, else all models.
    `pulls`: the downloads that were ordered; None: this supervisor does not download."""

    models: list[ModelState]
    on_demand: bool = False
    memory_budget: int | None = None
    pulls: list[PullState] | None = None


class ReadyWorker(Struct, frozen=True, array_like=True):
    """A worker that is ready, by process id: the model's name for clients, and `Ready.identity`."""

    pid: int
    model: str
    identity: str


class DesiredModels(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Desired state, from the gateway. `wanted`: names of the models that shall run; None: no change.
    `serving`: process ids of ready workers, and of the gateway once it serves clients. `workers`: more about
    those workers. `idle`: those of `leaving` without requests. `pulls`: all downloads that shall run; those
    missing are cancelled, and forgotten; None: no change."""

    wanted: list[str] | None = None
    serving: list[int] = []
    workers: list[ReadyWorker] = []
    idle: list[int] = []
    pulls: list[Pull] | None = None
