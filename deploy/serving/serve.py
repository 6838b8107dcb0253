"""What `roundhouse serve` runs: settings and children, out of flags, variables and the TOML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from deploy.serving import models
from deploy.serving.commandlines import child_commands
from deploy.serving.file import config_file, table
from deploy.serving.settings import ABOUT, PORT, PROGRAM, ServeSettings
from deploy.supervisor.child import Child
from protocol import settings, sockets


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, list[Child]]:
    """Settings and children, the gateway first. Raises `SettingsError` or `EndpointError`."""
    given, config = _given(argv, environ)
    endpoint = given.endpoint or _endpoint_of_gateway(given.port, config)
    served = models.read(given.model or _model_of_worker(config), config)
    given = replace(given, memory_budget=models.memory_budget(given.memory_budget, served))
    return given, child_commands(given, served, endpoint, config, environ)


def port(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Where clients connect to a `serve` that is told this. Raises `SettingsError`."""
    given, config = _given(argv, environ)
    return _port_of_gateway(given.port, config)


def _given(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, str | None]:
    given = settings.read(ServeSettings, "serve", argv, environ, program=PROGRAM, about=ABOUT)
    return given, config_file(argv, environ)


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
