"""The command lines of the gateway and the workers, out of what `serve` is told.

Whatever `serve` is told by a flag, a variable or `[serve]` it hands on as a flag, so it wins over `[gateway]`
and `[worker]`. What it is not told, the children find for themselves, in the same file and environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from deploy.serving.hosts import fallback_after_s
from deploy.serving.settings import ServeSettings
from deploy.supervisor.child import Child
from deploy.supervisor.models import DRAFTER, OF_SETS, ServedModel, plans
from protocol.settings import public_name

API_KEYS = "ROUNDHOUSE_API_KEYS"
GATEWAY_FLAGS = (
    "host",
    "port",
    "api_keys_file",
    "insecure_no_keys",
    "max_per_key",
    "cors_origins",
    "curve_keys",
    "join",
    "routing",
    "max_waiting",
    "max_waiting_tokens",
    "queue_timeout_s",
    "max_connections",
    "responses_max",
    "allow_media_hosts",
    "image_pixels_max",
    "video_frames_max",
    "failover_timeout_s",
    "load_timeout_s",
    "unload_after_s",
    "keep_awake",
    "keyless_metrics",
    "log_prompts",
    "inspect",
    "log_format",
    "log_level",
)
WORKER_FLAGS = (
    "hosts",
    "split",
    "backend",
    "hosts_port",
    "max_running",
    "text_only",
    "prefix_cache_ram",
    "prefix_cache_disk",
    "prefix_cache_dir",
    "image_cache",
    "speculation",
    "draft_model",
    "sparse_prefill",
    "drain_timeout_s",
    "curve_keys",
    "log_format",
    "log_level",
)

_HOME = Path(__file__).resolve().parents[2]


def child_commands(
    given: ServeSettings,
    served: Sequence[ServedModel],
    endpoint: str,
    config: str | None,
    environ: Mapping[str, str],
) -> list[Child]:
    """Gateway, then workers: stopped in this order, nothing new comes in while the last requests end."""
    meeting = [*_flag("config", config), *_flag("endpoint", endpoint)]
    # API keys travel in the environment: everybody can see a command line. They are no business of workers.
    bare = {name: value for name, value in environ.items() if name != API_KEYS}
    keys = {API_KEYS: ",".join(given.api_keys)} if given.api_keys else {}
    gateway = [*python_module("broker"), *meeting, *_handed_on(given, GATEWAY_FLAGS)]
    children = [Child("gateway", gateway, bare | keys, hears=True)]
    several = len(served) > 1
    for model in served:
        argv = [*python_module("worker"), *meeting, *worker_flags(given, model, several)]
        name = f"worker[{model.name}]" if several else "worker"
        after = fallback_after_s(given, model)
        worker = Child(name, argv, dict(bare), model=model, fallback_after_s=after)
        others = [
            replace(worker, argv=[*python_module("worker"), *meeting, *flags], model=plan)
            for plan in plans(model)
            if (flags := worker_flags(_for_plan(given, plan, model), plan, several))
        ]
        children += [_chained([worker, *others], child) for child in replica_names(name, model)]
    return children


def _chained(ways: Sequence[Child], name: str) -> Child:
    """The first of them, whose fallback is the second, and so on."""
    first, *others = ways
    return replace(first, name=name, fallback=_chained(others, name) if others else None)


def _for_plan(given: ServeSettings, plan: ServedModel, model: ServedModel) -> ServeSettings:
    """What is said for all, to one that takes the model's place."""
    others = [DRAFTER] if plan.model != model.model else []
    ports = {"hosts_port": given.hosts_port} if "hosts" in plan.settings else {}
    return msgspec.structs.replace(given, **{**dict.fromkeys((*OF_SETS, *others)), **ports})


def replica_names(name: str, model: ServedModel) -> list[str]:
    """Of a model's workers, each of which is started, ended and reloaded by itself."""
    return [name, *(f"{name}.{number}" for number in range(2, 1 + model.replicas))]


def worker_flags(given: ServeSettings, model: ServedModel, several: bool) -> list[str]:
    """What the worker of this model is told, but for where gateway and file are. Of two flags the last one
    counts, so what is said of one model wins over what is said for all."""
    flags = _model_flags(model, several) + _handed_on(given, WORKER_FLAGS)
    if given.memory_budget is not None:
        flags += _flag("memory_budget", given.memory_budget // model.replicas)
    for name, value in model.settings.items():
        flags += _flag(name, value)
    return flags


def _handed_on(given: ServeSettings, names: Sequence[str]) -> list[str]:
    return [word for name in names for word in _flag(public_name(name), getattr(given, name))]


def _model_flags(model: ServedModel, several: bool) -> list[str]:
    """One that nobody has named finds out by itself what it is and what it is called."""
    if several or model.named:
        return [*_flag("model", model.model or ""), *_flag("served_name", model.name)]
    return _flag("model", model.model)


def python_module(module: str) -> list[str]:
    """The command line of one of our packages, from the tree that this one was imported from.

    `-m` would look into the current folder first: somebody's own `worker.py` must not become our worker. Only
    a checkout that we run from is such a folder by right.
    """
    trusted = Path.cwd() == _HOME
    return [sys.executable, *([] if trusted else ["-P"]), "-m", module]


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    match value:
        case None | ():
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case tuple():
            value = ",".join(value)
    # One word with "=": a value that begins with a dash stays a value.
    return [f"--{flag}={value}"]
