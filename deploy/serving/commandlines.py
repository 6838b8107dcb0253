"""Processes of `serve`, each with its settings, and command lines of processes that run alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from deploy.serving.models import fallback_after_s
from deploy.serving.resolution import Resolved
from deploy.supervisor.child import Child, ServedModel, plans
from protocol.settings.reader import Values

API_KEYS = "ROUNDHOUSE_API_KEYS"
SOURCE_FOLDER = Path(__file__).resolve().parents[2]
"""Folder of our packages: a checkout, or where they are installed."""


def children_of(resolved: Resolved, environ: Mapping[str, str], own_keys: Sequence[str] = ()) -> list[Child]:
    """Return gateway, then workers: the stop order, so that no request arrives while the last ones end.
    `own_keys`: API keys of `serve` itself."""
    gateway = replace(resolved.gateway, api_keys=(*resolved.gateway.api_keys, *own_keys))
    env = {name: value for name, value in environ.items() if name != API_KEYS}
    children = [Child("gateway", python_module("broker"), env, gateway, hears=True)]
    for model in resolved.models:
        after_s = fallback_after_s(model, gateway.failover_timeout_s)
        worker: Child | None = None
        ways = zip((model, *plans(model)), resolved.workers[model.name], strict=True)
        for plan, settings in reversed([*ways]):
            worker = Child(
                "worker", python_module("worker"), env, settings,
                model=plan, is_set=settings.hosts is not None, fallback=worker, fallback_after_s=after_s,
            )  # fmt: skip
        name = f"worker[{model.name}]" if len(resolved.models) > 1 else "worker"
        assert worker is not None, "there is at least one plan"
        children += [worker.named(each) for each in replica_names(name, model)]
    return children


def replica_names(name: str, model: ServedModel) -> list[str]:
    """Return the names of a model's workers; each is started, stopped and reloaded separately."""
    return [name, *(f"{name}.{number}" for number in range(2, 1 + model.replicas))]


def python_module(module: str) -> list[str]:
    """Return the command line that runs one of our packages from the source tree of this one.

    `-m` alone would search the current folder first, where an unrelated `worker.py` could be run instead.
    Only if the current folder is our own checkout is it searched.
    """
    trusted = Path.cwd() == SOURCE_FOLDER
    utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []
    return [sys.executable, *utf8, *([] if trusted else ["-P"]), "-m", module]


def flags_of(values: Values, config: str | None) -> list[str]:
    """Return the flags of a process that reads its own section of the file itself. API keys are left out,
    because command lines are public."""
    names = [name for name, given in values.items() if not given.own and name != "api_keys"]
    words = [word for name in names for word in flag_words(name, values[name].value)]
    return [*flag_words("config", config), *words]


def flag_words(name: str, value: object) -> list[str]:
    """Return a setting as a flag; no words if it has its default, None or ()."""
    flag = name.replace("_", "-")
    match value:
        case None | ():
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case tuple() | list():
            value = ",".join(map(str, value))
    # One word with "=", so that a value may begin with a dash.
    return [f"--{flag}={value}"]
