"""Which endpoint a command is about: the options that say so, and what they lead to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.agents.setups import Endpoint

Url = Annotated[
    str | None, typer.Option(help="Where the endpoint is, as http://host:port; else that of serve.")
]
Port = Annotated[int | None, typer.Option(help="Where the gateway of that serve listens.")]
Config = Annotated[Path | None, typer.Option(help="The TOML file of that serve.")]


def endpoint(
    url: str | None, port: int | None, config: Path | None, environ: Mapping[str, str] = os.environ
) -> Endpoint:
    """Raises `SettingsError` or `OSError`. The keys of a file are for the `serve` that it is about."""
    from deploy.serving import clients

    flags = [f"--{name}={value}" for name, value in (("port", port), ("config", config)) if value is not None]
    found = clients.url(flags, environ) if url is None else url.rstrip("/").removesuffix("/v1")
    keys = clients.keys(flags, environ) if url is None else clients.keys_at_hand(environ)
    return Endpoint(found, *keys[:1])
