"""Options that select the endpoint of a command, and the resulting URL and key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.agents.profiles import Endpoint

Url = Annotated[
    str | None, typer.Option(help="URL of the endpoint, as http://host:port (default: that of serve).")
]
Host = Annotated[str | None, typer.Option(help="Address of that serve.")]
Port = Annotated[int | None, typer.Option(help="Port of that serve.")]
Config = Annotated[Path | None, typer.Option(help="TOML file of that serve.")]


def endpoint(
    url: str | None,
    host: str | None,
    port: int | None,
    config: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> Endpoint:
    """Return URL and key. Keys in the file apply only to its own `serve`, not to another `url`.

    Raises `SettingsError` or `OSError`.
    """
    from deploy.serving import clients
    from deploy.serving.resolution import resolve_gateway

    if url is not None:
        return Endpoint(url.rstrip("/").removesuffix("/v1"), *clients.existing_keys(environ)[:1])
    gateway = resolve_gateway(flags_of(host, port, config), environ)
    return Endpoint(clients.url(gateway.host, gateway.port), *clients.keys(gateway)[:1])


def flags_of(host: str | None, port: int | None, config: Path | None) -> list[str]:
    """Return the flags of that `serve` by which its settings are read."""
    given = {"host": host, "port": port, "config": config}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


@contextlib.contextmanager
def exit_on_errors(program: str, *kinds: type[Exception]) -> Iterator[None]:
    """End the command with a message at an invalid setting, an `OSError` or an error of these kinds."""
    from protocol.settings import reader
    from protocol.sockets import EndpointError

    known: tuple[type[Exception], ...] = (reader.SettingsError, EndpointError, OSError, *kinds)
    try:
        yield
    except known as error:
        reader.exit_with(program, error)
