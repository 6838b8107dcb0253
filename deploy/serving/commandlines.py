"""Command lines of the gateway and the workers, derived from the settings of `serve`.

Settings that `serve` gets from a flag, a variable or `[serve]` are passed on as flags, so they override
`[gateway]` and `[worker]`. All other settings the children read themselves, from the same file and variables.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from deploy.serving.models import fallback_after_s
from deploy.serving.settings import GATEWAY_FLAGS, WORKER_FLAGS, ServeSettings
from deploy.supervisor.child import ADAPTERS, OF_MODEL, OF_SETS, Child, ServedModel, plans
from protocol.settings.reader import public_name

API_KEYS = "ROUNDHOUSE_API_KEYS"
SOURCE_FOLDER = Path(__file__).resolve().parents[2]
"""Folder of our packages: a checkout, or where they are installed."""


def child_commands(
    given: ServeSettings,
    served: Sequence[ServedModel],
    endpoint: str,
    config: str | None,
    environ: Mapping[str, str],
) -> list[Child]:
    """Return gateway, then workers: the stop order, so that no request arrives while the last ones end."""
    meeting = [*flag_words("config", config), *flag_words("endpoint", endpoint)]
    # API keys are passed in the environment, because command lines are public. Workers do not get them.
    bare = {name: value for name, value in environ.items() if name != API_KEYS}
    keys = {API_KEYS: ",".join(given.api_keys)} if given.api_keys else {}
    gateway = [*python_module("broker"), *meeting, *_handed_on(given, GATEWAY_FLAGS)]
    children = [Child("gateway", gateway, bare | keys, hears=True)]
    several = len(served) > 1
    for model in served:
        argv = [*python_module("worker"), *meeting, *worker_flags(given, model)]
        name = f"worker[{model.name}]" if several else "worker"
        after = fallback_after_s(given, model)
        worker = Child(name, argv, dict(bare), model=model, fallback_after_s=after)
        others = [
            replace(worker, argv=[*python_module("worker"), *meeting, *flags], model=plan)
            for plan in plans(model)
            if (flags := worker_flags(_for_plan(given, plan, model), plan))
        ]
        children += [_chained([worker, *others], child) for child in replica_names(name, model)]
    return children


def _chained(ways: Sequence[Child], name: str) -> Child:
    """Return the first of `ways`, with the second as its fallback, and so on."""
    first, *others = ways
    return replace(first, name=name, fallback=_chained(others, name) if others else None)


def _for_plan(given: ServeSettings, plan: ServedModel, model: ServedModel) -> ServeSettings:
    """Return the settings for all models as they apply to a fallback plan of `model`."""
    others = [*OF_MODEL] if plan.model != model.model else []
    others += [ADAPTERS] if "hosts" in plan.settings else []
    ports = {"hosts_port": given.hosts_port} if "hosts" in plan.settings else {}
    return msgspec.structs.replace(given, **{**dict.fromkeys((*OF_SETS, *others)), **ports})


def replica_names(name: str, model: ServedModel) -> list[str]:
    """Return the names of a model's workers; each is started, stopped and reloaded separately."""
    return [name, *(f"{name}.{number}" for number in range(2, 1 + model.replicas))]


def worker_flags(given: ServeSettings, model: ServedModel) -> list[str]:
    """Return the flags of a model's worker, except for endpoint and configuration file. The last of two
    equal flags counts, so settings of one model override those for all.

    The worker is told its name: what it would derive itself may change between two starts."""
    flags = [*flag_words("model", model.model or ""), *flag_words("served_name", model.name)]
    flags += _handed_on(given, WORKER_FLAGS)
    if given.memory_budget is not None:
        flags += flag_words("memory_budget", given.memory_budget // model.replicas)
    for name, value in model.settings.items():
        flags += flag_words(name, value)
    return flags


def _handed_on(given: ServeSettings, names: Sequence[str]) -> list[str]:
    return [word for name in names for word in flag_words(public_name(name), getattr(given, name))]


def python_module(module: str) -> list[str]:
    """Return the command line that runs one of our packages from the source tree of this one.

    `-m` alone would search the current folder first, where an unrelated `worker.py` could be run instead.
    Only if the current folder is our own checkout is it searched.
    """
    trusted = Path.cwd() == SOURCE_FOLDER
    utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []
    return [sys.executable, *utf8, *([] if trusted else ["-P"]), "-m", module]


def flag_words(name: str, value: object) -> list[str]:
    """Return a setting as a flag; no words if it has its default, None or ()."""
    flag = name.replace("_", "-")
    match value:
        case None | ():
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case tuple():
            value = ",".join(value)
    # One word with "=", so that a value may begin with a dash.
    return [f"--{flag}={value}"]
