"""What `roundhouse serve` runs: settings and children, out of flags, variables and the TOML file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from deploy.serving import models
from deploy.serving.commandlines import child_commands, worker_flags
from deploy.serving.file import table
from deploy.serving.hosts import with_fallback, wrong_hosts
from deploy.serving.settings import ABOUT, PORT, PROGRAM, ServeSettings
from deploy.supervisor.child import Child
from deploy.supervisor.models import ServedModel
from protocol import settings, sockets
from protocol.settings import SettingsError
from protocol.workersettings import WorkerSettings


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, list[Child]]:
    """Settings and children, the gateway first. Raises `SettingsError` or `EndpointError`.

    All that is wrong is said at once: of `serve`, and of each worker, whenever that one would start. Its own
    section the gateway judges itself: it starts at once, and everything ends with it.
    """
    errors: list[str] = []
    given = config = None
    with _collected(errors):
        config = settings.config_file(argv, environ)
        given = own_settings(argv, environ)
    named = (given.model if given else ()) or _model_of_worker(config)
    served = models.read(named, config, errors, replicas=given.replicas if given else 1)
    if given is not None and len(served) == 1:
        served = [with_fallback(served[0], given)]
    if given is not None:
        with _collected(errors):
            given = _with_budget(given, served)
        errors += _refused_by_workers(given, served, config, environ)
        errors += wrong_hosts(given, served)
    errors += settings.unknown_keys(WorkerSettings, "worker", table("worker", config), config or "")
    if errors or given is None:
        raise SettingsError("\n".join(dict.fromkeys(errors)))
    endpoint = given.endpoint or _endpoint_of_gateway(given.port, config)
    return given, child_commands(given, served, endpoint, config, environ)


def port(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Where clients connect to a `serve` that is told this. Raises `SettingsError`."""
    return _port_of_gateway(own_settings(argv, environ).port, settings.config_file(argv, environ))


def own_settings(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """What `serve` itself is told. Raises `SettingsError`."""
    others = {"worker": WorkerSettings}
    return settings.read(
        ServeSettings, "serve", argv, environ, program=PROGRAM, about=ABOUT, elsewhere=others
    )


def _with_budget(given: ServeSettings, served: Sequence[ServedModel]) -> ServeSettings:
    """With what there is for the models: the spare's share is not theirs. Raises `SettingsError`."""
    budget = models.memory_budget(given.memory_budget, served)
    if budget is None or not given.spare:
        return replace(given, memory_budget=budget)
    left = models.beside_spare(budget, served)
    return replace(given, memory_budget=budget if left is None else left, spare=0 if left is None else 1)


@contextlib.contextmanager
def _collected(errors: list[str]) -> Iterator[None]:
    """What is wrong with settings is noted, and does not keep us from looking at others."""
    try:
        yield
    except SettingsError as error:
        errors += str(error).splitlines()


def _refused_by_workers(
    given: ServeSettings, served: Sequence[ServedModel], config: str | None, environ: Mapping[str, str]
) -> list[str]:
    """What each worker would say of what it is told, and of the section and the variables that it finds."""
    errors: list[str] = []
    for model in served:
        flags = worker_flags(given, model, several=len(served) > 1)
        argv = [f"--config={config}", *flags] if config else flags
        with _collected(errors):
            settings.read(WorkerSettings, "worker", argv, environ, program=PROGRAM, about="")
    return errors


def _model_of_worker(config: str | None) -> tuple[str, ...]:
    found = table("worker", config).get("model")
    return (found,) if isinstance(found, str) else ()


def _endpoint_of_gateway(port: int | None, config: str | None) -> str:
    """Where the gateway would bind by itself: its own section counts, or the two would not meet."""
    endpoint = table("gateway", config).get("endpoint")
    if isinstance(endpoint, str) and endpoint:
        return endpoint
    return sockets.default_endpoint(_port_of_gateway(port, config))


def _port_of_gateway(port: int | None, config: str | None) -> int:
    if port is not None:
        return port
    # A port of another type is for the gateway to refuse.
    return found if isinstance(found := table("gateway", config).get("port"), int) else PORT
