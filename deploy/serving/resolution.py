"""One resolution of all settings of `roundhouse serve`: its own, the gateway's and those of each worker.

Flags, variables and file are read once. The highest precedence has the table of a model, then flags,
variables, `[serve]`, `[gateway]` or `[worker]`, and last the defaults. All errors are reported together.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any

import msgspec

from deploy.serving import models
from deploy.serving.models import wrong_hosts
from deploy.serving.settings import ABOUT, PROGRAM, SHOWN, ServeSettings, default_keys_file, shown_flags
from deploy.supervisor.child import ADAPTERS, OF_MODEL, OF_SETS, PORT_OF_SETS, ServedModel, plans
from deploy.supervisor.memory import EXPERTS_MEMORY
from protocol import sockets
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import Given, SettingsError, Sources, Values, convert, of_table
from protocol.settings.worker import WorkerSettings

_HOST = re.compile(r"(\w[\w.-]*)?")
"""A name or an IPv4 address; empty: all addresses."""
_KEYS = "api_keys", "api_keys_file", "insecure_no_keys"
_UNSET = "", "0", "false", "[]"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of all processes. `workers`: by the name of the model, followed by those of its fallback
    plans. `for_gateway`, `for_workers`: the values that are no defaults, each with its source. `document`:
    the file, at `config`."""

    serve: ServeSettings
    gateway: GatewaySettings
    workers: Mapping[str, Sequence[WorkerSettings]]
    models: Sequence[ServedModel]
    for_gateway: Values
    for_workers: Mapping[str, Values]
    config: str | None
    document: Mapping[str, Any]

    @property
    def first_plans(self) -> list[WorkerSettings]:
        """The settings of the workers as long as no fallback plan takes over."""
        return [first for first, *_ in self.workers.values()]

    @property
    def drain_timeout_s(self) -> float:
        """The longest time that gateway or workers have to finish their requests."""
        return max(self.gateway.drain_timeout_s, *(each.drain_timeout_s for each in self.first_plans))


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> Resolved:
    """Return the settings of all processes. Raises `SettingsError` or `EndpointError`."""
    sources = _sources(argv, environ)
    errors, config = sources.errors, sources.config
    own = convert(ServeSettings, sources.values(ServeSettings, "serve"), errors)
    for_gateway, gateway = _gateway(sources, environ)
    base = sources.values(WorkerSettings, "worker", "serve")
    served = _models(own or ServeSettings(), base, sources)
    sources.check_keys("worker", WorkerSettings.__struct_encode_fields__)
    weighed = _weighed(served, base)
    with _collected(errors):
        own = _with_budget(own, weighed) if own is not None else None
    endpoint = gateway.endpoint if gateway is not None else ""
    budget = own.memory_budget if own is not None else None
    values = {model.name: _of_plans(model, base, budget, endpoint, config) for model in served}
    workers = {name: _converted(found, errors) for name, found in values.items()}
    if own is not None and gateway is not None and all(workers.values()):
        for_all = [name for name, each in base.items() if each.value and not each.own]
        for_all += ["fallback"] if own.fallback else []
        pairs = [(model, workers[model.name]) for model in served]
        errors += wrong_hosts(for_all, pairs, gateway.failover_timeout_s)
    sources.check()
    assert own is not None, "there are no errors"
    assert gateway is not None, "there are no errors"
    return Resolved(
        serve=own,
        gateway=gateway,
        workers=workers,
        models=weighed,
        for_gateway=for_gateway,
        for_workers={name: found[0] for name, found in values.items()},
        config=config,
        document=sources.document,
    )


def _converted(plans: Sequence[Values], errors: list[str]) -> list[WorkerSettings]:
    found = (convert(WorkerSettings, values, errors) for values in plans)
    return [settings for settings in found if settings is not None]


def _weighed(served: Sequence[ServedModel], base: Values) -> list[ServedModel]:
    """Return the models with the `--experts-memory` of all of them, on which their size depends."""
    if EXPERTS_MEMORY not in base:
        return list(served)
    experts = {EXPERTS_MEMORY: base[EXPERTS_MEMORY].value}
    return [msgspec.structs.replace(model, settings=experts | model.settings) for model in served]


def resolve_gateway(argv: Sequence[str], environ: Mapping[str, str]) -> GatewaySettings:
    """Return the settings of the gateway alone, for commands that look for a running one. Raises
    `SettingsError` or `EndpointError`."""
    sources = _sources(argv, environ)
    _, gateway = _gateway(sources, environ)
    sources.check()
    assert gateway is not None, "there are no errors"
    return gateway


def _sources(argv: Sequence[str], environ: Mapping[str, str]) -> Sources:
    others: dict[str, type[msgspec.Struct]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
    sources = Sources(shown_flags(), argv, environ, program=PROGRAM, about=ABOUT, elsewhere=others)
    sources.check_keys("serve", SHOWN)
    sources.check_keys("gateway", GatewaySettings.__struct_encode_fields__)
    return sources


def _gateway(sources: Sources, environ: Mapping[str, str]) -> tuple[Values, GatewaySettings | None]:
    """Return the gateway's settings, with the keys of `roundhouse keys create` unless settings name others or
    none, and with the endpoint."""
    values = sources.values(GatewaySettings, "gateway", "serve")
    default = default_keys_file(environ)
    named = [name for name in _KEYS if name in values and str(values[name].value).lower() not in _UNSET]
    if not named and default is not None and default.is_file():
        values["api_keys_file"] = Given(str(default), "")
    found = convert(GatewaySettings, values, sources.errors)
    if found is None:
        return values, None
    if not _HOST.fullmatch(found.host) and not _is_ipv6(found.host):
        sources.errors.append(f"host: {found.host!r} is neither an IP address nor the name of a host")
        return values, None
    if found.endpoint:
        return values, found
    values["endpoint"] = Given(sockets.default_endpoint(found.server), "")
    return values, msgspec.structs.replace(found, endpoint=values["endpoint"].value)


def _is_ipv6(host: str) -> bool:
    try:
        return bool(IPv6Address(host))
    except ValueError:
        return False


def _models(own: ServeSettings, base: Values, sources: Sources) -> list[ServedModel]:
    """Return the models. `base`: what is given for all workers."""
    alone = sources.table("worker").get("model")
    named = own.model or ((alone,) if isinstance(alone, str) else ())
    tables = sources.document.get("models", {})
    found = models.read(named, tables, sources.config, sources.errors, replicas=own.replicas)
    if len(found) > 1:
        return found
    fields: dict[str, Any] = {}
    name = base["served_name"].value if "served_name" in base else None
    if not found[0].named and isinstance(name, str) and name:
        fields |= {"name": name, "named": True}
    if own.fallback:
        fields["fallback"] = own.fallback
    if own.fallback_after_s is not None:
        fields["fallback_after"] = own.fallback_after_s
    return [msgspec.structs.replace(found[0], **fields)]


def _with_budget(own: ServeSettings, served: Sequence[ServedModel]) -> ServeSettings:
    """Return the settings with the models' memory budget, less the spare's share. Raises `SettingsError`."""
    budget = models.memory_budget(own.memory_budget, served)
    if budget is None or not own.spare:
        return msgspec.structs.replace(own, memory_budget=budget)
    left = models.beside_spare(budget, served)
    if left is None:
        return msgspec.structs.replace(own, memory_budget=budget, spare=0)
    return msgspec.structs.replace(own, memory_budget=left)


def _of_plans(
    model: ServedModel, base: Values, budget: int | None, endpoint: str, config: str | None
) -> list[Values]:
    """Return what is given for the workers of a model, followed by those of its fallback plans.

    A worker is given its name: what it would derive itself may change between two starts."""
    found = []
    for plan in (model, *plans(model)):
        values = {name: given for name, given in base.items() if plan is model or _applies(name, plan, model)}
        if budget is not None:
            values["memory_budget"] = Given(budget // model.replicas, "")
        for name, value in plan.settings.items():
            values[name] = of_table(WorkerSettings, name, value, str(config), f"[models.{model.name}] ")
        texts = {"endpoint": endpoint, "model": plan.model or "", "served_name": model.name}
        fixed = {name: Given(value, "") for name, value in texts.items()}
        found.append(fixed | {name: given for name, given in values.items() if name not in fixed})
    return found


def _applies(name: str, plan: ServedModel, model: ServedModel) -> bool:
    """Return whether a setting for all workers is valid for a fallback plan of `model`."""
    if "hosts" in plan.settings and name in (PORT_OF_SETS, ADAPTERS):
        return name == PORT_OF_SETS
    return name not in OF_SETS and (plan.model == model.model or name not in OF_MODEL)


@contextlib.contextmanager
def _collected(errors: list[str]) -> Iterator[None]:
    """Collect settings errors instead of raising them."""
    try:
        yield
    except SettingsError as error:
        errors += str(error).splitlines()
