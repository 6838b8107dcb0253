"""Models that `serve` serves: named by flags, by a variable, or by tables in the TOML file.

roundhouse serve --model small=mlx-community/Qwen3-0.6B-4bit --model ~/models/large

[models.small]                               # what clients call it
model = "mlx-community/Qwen3-0.6B-4bit"      # an id or a folder; none: the embedded model
aliases = ["gpt-4o-mini"]
resident = true                              # loaded at the start, and never unloaded
fallback = ["@three.json", "~/models/less"]  # replace it, in order, after fallback_after = 30 s each
replicas = 2                                 # number of workers, each with its own weights
max_running = 8                              # and any other setting of a worker

The keys of a table become flags of that model's worker, which may start much later. They are therefore
validated here, by the worker's rules, and so are hostfiles and fallbacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
from msgspec.structs import fields, replace

from deploy.serving.settings import GATEWAY, ServeSettings, document
from deploy.supervisor.child import ServedModel, plans
from deploy.supervisor.memory import EXPERTS_MEMORY, all_weight_bytes
from protocol.common.error_text import setting_hint
from protocol.common.model_folder import POCKET, expand_user, folder_of, name_of
from protocol.hosts import Backend, HostsError, problem_with
from protocol.hosts import read as read_hosts
from protocol.settings.reader import SettingsError, describe, refusal, spell_size
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

FALLBACK_AFTER_S = 60.0
_OF_ONE = ("hosts", "fallback", "adapters")
"""Flags that apply only if there is a single model."""


def read(
    named: Sequence[str], config: str | None, errors: list[str], *, replicas: int = 1
) -> list[ServedModel]:
    """Return the models in `named`, then those of the file, else the embedded model. `named` overrides the
    model of a table of the same name. `replicas`: the default for tables without it.

    Wrong keys are left out, and reported as lines appended to `errors`.
    """
    models = {model.name: model for model in _tables(config, errors, replicas)}
    for word in reversed(named):
        model = _of_word(word, replicas)
        if model.name in models:
            model = msgspec.structs.replace(models.pop(model.name), model=model.model)
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


def _tables(config: str | None, errors: list[str], replicas: int) -> list[ServedModel]:
    tables = document(config).get("models", {})
    if not isinstance(tables, dict):
        errors.append(f"{config}: models must be tables like [models.NAME]")
        return []
    models = []
    for name, table in tables.items():
        if not isinstance(table, dict):
            errors.append(f"[models.{name}]: must be a table (from {config})")
            continue
        wrong = _wrong_in(table)
        errors += [f"[models.{name}] {key}: {why} (from {config})" for key, why in wrong.items()]
        right = {key: table[key] for key in table if key not in wrong}
        models.append(_of_table(name, {"replicas": replicas, **right}))
    return models


def _wrong_in(table: Mapping[str, object]) -> dict[str, str]:
    """Return the error of each wrong key, unknown keys first."""
    known = WorkerSettings.__struct_encode_fields__
    unknown = [key for key in table if key not in _OWN and key not in known]
    judged = {key: _why_not(key, value) for key, value in table.items() if key not in unknown}
    names = {key: f"unknown key{setting_hint(key, [*_OWN, *known])}" for key in unknown}
    return names | {key: why for key, why in judged.items() if why is not None}


def _why_not(key: str, value: object) -> str | None:
    if key not in _OWN:
        return refusal(WorkerSettings, key, value)
    try:
        msgspec.convert(value, _OWN[key])
    except msgspec.ValidationError as error:
        return describe(error, _OWN[key])
    return None


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


def with_fallback(model: ServedModel, given: ServeSettings) -> ServedModel:
    """Return the model with the fallback settings of `serve`."""
    told: dict[str, Any] = {}
    if given.fallback:
        told["fallback"] = given.fallback
    if given.fallback_after_s is not None:
        told["fallback_after"] = given.fallback_after_s
    return replace(model, **told)


def with_experts_memory(model: ServedModel, given: ServeSettings) -> ServedModel:
    """Return the model with the `--experts-memory` of all models, if it has none of its own."""
    size = getattr(given, EXPERTS_MEMORY)
    return model if size is None else replace(model, settings={EXPERTS_MEMORY: size, **model.settings})


def wrong_hosts(given: ServeSettings, served: Sequence[ServedModel]) -> list[str]:
    """Return one line for each error."""
    told = [name for name in _OF_ONE if getattr(given, name)]
    if told and len(served) > 1:
        return [f"{name}: with several models, set it for one, under [models.NAME]" for name in told]
    sets = [model for model in served if given.hosts or "hosts" in model.settings]
    twice = [model.name for model in sets if model.replicas > 1]
    if twice:
        return [f"hosts: {', '.join(twice)}: remove replicas, they would use the same ports on the hosts"]
    late = [line for model in served if (line := _too_late(given, model))]
    return late + [line for path, backend in _named(given, served) if (line := _wrong(path, backend))]


def fallback_after_s(given: ServeSettings, model: ServedModel) -> float:
    """Return how long a plan may be down before the next takes over: as configured, or such that streams
    survive until the last plan."""
    each = (given.failover_timeout_s or GATEWAY.failover_timeout_s) / (1 + len(plans(model)))
    return model.fallback_after or min(FALLBACK_AFTER_S, each)


def _too_late(given: ServeSettings, model: ServedModel) -> str | None:
    """Return an error if streams would time out before the last plan takes over."""
    count, within = len(plans(model)), given.failover_timeout_s or GATEWAY.failover_timeout_s
    last = count * fallback_after_s(given, model)
    if last < within:
        return None
    return (
        f"fallback: {model.name}: the last of {count} takes over after {last:g} s, but streams wait for"
        f" {within:g} s: set a shorter --fallback-after or a longer --failover-timeout"
    )


def _named(given: ServeSettings, served: Sequence[ServedModel]) -> Iterator[tuple[Path, Backend | None]]:
    """Yield each hostfile with its configured backend."""
    for model in served:
        path = model.settings.get("hosts", given.hosts)
        backend = model.settings.get("backend", given.backend)
        for plan in plans(model):
            if "hosts" in plan.settings:
                yield expand_user(Path(str(plan.settings["hosts"]))), None
        if path is not None:
            yield expand_user(Path(str(path))), cast("Backend | None", backend)


def _wrong(path: Path, backend: Backend | None) -> str | None:
    try:
        hosts = read_hosts(path)
    except HostsError as error:
        return f"hosts: {error}"
    wrong = problem_with(hosts, backend or hosts.backend or "ring")
    return f"hosts: {path}: {wrong}" if wrong else None
