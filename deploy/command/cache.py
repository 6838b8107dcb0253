"""`roundhouse cache`: the prefix cache on disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from deploy.command.endpoint import Config, Port, endpoint

PROGRAM = "roundhouse cache"


def cache(context: typer.Context, config: Config = None) -> None:
    """Show the prefix cache on disk: folders, sizes and ages. It holds prompts in the form of KV caches."""
    if context.invoked_subcommand is not None:
        return
    from deploy.console.table import duration, size
    from deploy.serving import prefix_cache

    with _cache_errors():
        written = _folders(config)
        if not written:
            typer.echo("with these settings no prompts are written to disk")
        for folder, limit in written.items():
            found, now = prefix_cache.models(folder), time.time()
            total = sum(model.bytes for model in found)
            typer.echo(f"{folder}: {size(total)}, at most {size(limit)} for each model")
            for model in found:
                ages = f"{duration(now - model.newest_at)} to {duration(now - model.oldest_at)} old"
                typer.echo(f"{size(model.bytes):>9}  {model.files:>6} files  {ages}  {model.fingerprint}")


def clear(port: Port = None, config: Config = None) -> None:
    """Delete the prefix cache on disk, and in the memory of a server that runs."""
    from deploy.console import http
    from deploy.console.table import size
    from deploy.serving import prefix_cache

    with _cache_errors():
        stored = {
            folder: sum(model.bytes for model in prefix_cache.models(folder)) for folder in _folders(config)
        }
        # First the server, which would otherwise keep in memory what is deleted.
        with http.open_client(endpoint(None, port, config)) as client:
            refusal = http.clear_cache(client)
        for folder, total in stored.items():
            prefix_cache.clear(folder, time.time())
            typer.echo(f"{folder}: deleted {size(total)}")
        if refusal:
            typer.echo(f"{PROGRAM}: the running server keeps its prefixes in memory: {refusal}", err=True)
            raise typer.Exit(1)


def _folders(config: Path | None) -> dict[Path, int]:
    from deploy.serving import prefix_cache, serve

    _, children = serve.read([] if config is None else [f"--config={config}"], os.environ)
    return prefix_cache.folders(children)


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    from protocol import settings, sockets

    try:
        yield
    except (settings.SettingsError, sockets.EndpointError, OSError) as error:
        settings.exit_with(PROGRAM, error)
