"""Models that `serve` serves: named by flags, by a variable, or by tables in the TOML file.

roundhouse serve --model small=mlx-community/Qwen3-0.6B-4bit --model ~/models/large

[models.small]                               # what clients call it
model = "mlx-community/Qwen3-0.6B-4bit"      # an id or a folder; none: the embedded model
aliases = ["gpt-4o-mini"]
resident = true                              # loaded at the start, and never unloaded
fallback = ["@three.json", "~/models/less"]  # replace it, in order, after fallback_after = 30 s each
replicas = 2                                 # number of workers, each with its own weights
max_running = 8                              # and any other setting of a worker

The keys of a table are settings of that model's worker (`deploy.serving.resolution`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import fields, replace

from deploy.supervisor.child import ServedModel, plans
from deploy.supervisor.memory import all_weight_bytes
from protocol.common.error_text import setting_hint
from protocol.common.model_folder import POCKET, folder_of, name_of
from protocol.hosts import Backend, HostsError, problem_with
from protocol.hosts import read as read_hosts
from protocol.settings.reader import SettingsError, describe, spell_size
from protocol.settings.worker import WorkerSettings

BUDGET_SHARE = 0.7
"""Default share of the machine's memory for several models."""

SPARE_BYTES = 150_000_000
"""Memory of a process that has imported everything a worker needs and holds no model."""

_NAME = re.compile(r"[^\x00-\x1f\[\]]{1,200}")
_NAMED = re.compile(r"([\w.:@+-]{1,200})=(.*)")
_OWN = {
    field.name: field.type
    for field in fields(ServedModel)
    if field.name in ("model", "aliases", "resident", "replicas", "fallback", "fallback_after")
}
"""Keys of a table that describe the model, with their types; all others are settings of the worker."""

Served = Sequence[tuple[ServedModel, Sequence[WorkerSettings]]]
"""Models, each with the settings of its workers, followed by those of its fallback plans."""

FALLBACK_AFTER_S = 60.0
_OF_ONE = ("hosts", "fallback", "adapters")
"""Flags that apply only if there is a single model."""


def read(
    named: Sequence[str], tables: object, config: str | None, errors: list[str], *, replicas: int = 1
) -> list[ServedModel]:
    """Return the models in `named`, then those of the file's `tables`, else the embedded model. `named`
    overrides the model of a table of the same name. `replicas`: the default for tables without it.

    Wrong keys of `ServedModel` are left out, and reported as lines appended to `errors`.
    """
    models = {model.name: model for model in _tables(tables, config, errors, replicas)}
    for word in reversed(named):
        model = _of_word(word, replicas)
        if model.name in models:
            model = replace(models.pop(model.name), model=model.model)
        models = {model.name: model, **models}
    found = list(models.values()) or [ServedModel(name=POCKET, replicas=replicas)]
    errors += _wrong_names(found)
    return found


def model_of_flag(word: str | None) -> ServedModel:
    """Return the model of one `--model`, or the embedded one."""
    return _of_word(word, 1) if word else ServedModel(name=POCKET)


def _of_word(word: str, replicas: int) -> ServedModel:
    name, model = split_name(word)
    if name is None:
        return ServedModel(name=name_of(word), model=word, replicas=replicas)
    return ServedModel(name=name, model=model or None, named=True, replicas=replicas)


def split_name(word: str) -> tuple[str | None, str]:
    """Split NAME=MODEL; the name is None if there is none, also for a folder with such a name."""
    given = _NAMED.fullmatch(word)
    return (None, word) if given is None or folder_of(word).exists() else (given[1], given[2])


def _tables(tables: object, config: str | None, errors: list[str], replicas: int) -> Iterator[ServedModel]:
    if not isinstance(tables, dict):
        errors.append(f"{config}: models must be tables like [models.NAME]")
        return
    for name, table in tables.items():
        if not isinstance(table, dict):
            errors.append(f"[models.{name}]: must be a table (from {config})")
            continue
        wrong = _wrong_in(table)
        errors += [f"[models.{name}] {key}: {why} (from {config})" for key, why in wrong.items()]
        yield _of_table(name, {"replicas": replicas} | {key: table[key] for key in table if key not in wrong})


def _wrong_in(table: Mapping[str, object]) -> dict[str, str]:
    """Return the error of each unknown key, and of each wrong one that describes the model."""
    known = [*_OWN, *WorkerSettings.__struct_encode_fields__]
    wrong = {key: f"unknown key{setting_hint(key, known)}" for key in table if key not in known}
    for key in (key for key in table if key in _OWN):
        try:
            msgspec.convert(table[key], _OWN[key])
        except msgspec.ValidationError as error:
            wrong[key] = describe(error, _OWN[key])
    return wrong


def _of_table(name: str, table: Mapping[str, Any]) -> ServedModel:
    own = {key: value for key, value in table.items() if key in _OWN}
    others = {key: value for key, value in table.items() if key not in _OWN}
    return msgspec.convert({"name": name, "named": True, "settings": others, **own}, ServedModel)


def _wrong_names(models: Sequence[ServedModel]) -> list[str]:
    names = [name for model in models for name in (model.name, *model.aliases)]
    wrong = [f"model {name!r}: invalid name" for name in names if _NAME.fullmatch(name) is None]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [*wrong, *(f"model {name!r}: duplicate name" for name in twice)]


def memory_budget(given: int | None, models: Sequence[ServedModel]) -> int | None:
    """Return the bytes for all models; None: no limit, because there is one model with one worker.

    Raises `SettingsError` if the resident models do not fit.
    """
    if given is None and len(models) == models[0].replicas == 1:
        return None
    budget = int(BUDGET_SHARE * psutil.virtual_memory().total) if given is None else given
    resident = sum(all_weight_bytes(model) or 0 for model in models if model.resident)
    if resident > budget:
        raise SettingsError(
            f"memory_budget: {spell_size(budget)} bytes are too few:"
            f" the resident models take {resident} bytes"
        )
    return budget


def beside_spare(budget: int, models: Sequence[ServedModel]) -> int | None:
    """Return the budget that a spare leaves for models; None: too little for the resident models plus the
    largest other one and its process."""
    sizes = [(model.resident, all_weight_bytes(model) or 0) for model in models]
    resident = sum(size for is_resident, size in sizes if is_resident)
    other = max((size for is_resident, size in sizes if not is_resident), default=0)
    left = budget - SPARE_BYTES
    return left if left >= resident + other + SPARE_BYTES else None


def wrong_hosts(named: Collection[str], served: Served, failover_s: float) -> list[str]:
    """Return one line for each error. `named`: settings that are given for all models. `failover_s`: how long
    streams wait for another worker."""
    misplaced = [name for name in _OF_ONE if name in named]
    if misplaced and len(served) > 1:
        return [f"{name}: with several models, set it for one, under [models.NAME]" for name in misplaced]
    twice = [model.name for model, [first, *_] in served if first.hosts and model.replicas > 1]
    if twice:
        return [f"hosts: {', '.join(twice)}: remove replicas, they would use the same ports on the hosts"]
    late = [line for model, _ in served if (line := _too_late(model, failover_s))]
    plans = [plan for _, found in served for plan in found]
    return late + [line for plan in plans if plan.hosts and (line := _wrong(plan.hosts, plan.backend))]


def fallback_after_s(model: ServedModel, failover_s: float) -> float:
    """Return how long a plan may be down before the next takes over: as configured, or such that streams
    survive until the last plan."""
    return model.fallback_after or min(FALLBACK_AFTER_S, failover_s / (1 + len(plans(model))))


def _too_late(model: ServedModel, failover_s: float) -> str | None:
    """Return an error if streams would time out before the last plan takes over."""
    count = len(plans(model))
    last = count * fallback_after_s(model, failover_s)
    if last < failover_s:
        return None
    return (
        f"fallback: {model.name}: the last of {count} takes over after {last:g} s, but streams wait for"
        f" {failover_s:g} s: set a shorter --fallback-after or a longer --failover-timeout"
    )


def _wrong(path: Path, backend: Backend | None) -> str | None:
    try:
        hosts = read_hosts(path)
    except HostsError as error:
        return f"hosts: {error}"
    wrong = problem_with(hosts, backend or hosts.backend or "ring")
    return f"hosts: {path}: {wrong}" if wrong else None
