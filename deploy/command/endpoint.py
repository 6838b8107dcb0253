"""Options that select the endpoint of a command, and the resulting URL and key."""

from __future__ import annotations

import os
from collections.abc import Mapping
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

    flags = flags_of(host, port, config)
    found = clients.url(flags, environ) if url is None else url.rstrip("/").removesuffix("/v1")
    keys = clients.keys(flags, environ) if url is None else clients.existing_keys(environ)
    return Endpoint(found, *keys[:1])


def flags_of(host: str | None, port: int | None, config: Path | None) -> list[str]:
    """Return the flags of that `serve` by which its settings are read."""
    given = {"host": host, "port": port, "config": config}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
