"""`roundhouse cache`: the prefix cache on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import typer

from deploy.command.endpoint import Config, Host, Port, endpoint, exit_on_errors, flags_of

PROGRAM = "roundhouse cache"


def cache(context: typer.Context, host: Host = None, port: Port = None, config: Config = None) -> None:
    """Show the prefix cache: folders, sizes and ages on disk, and what a running server has in memory. It
    holds prompts in the form of KV caches."""
    if context.invoked_subcommand is not None:
        return
    from deploy.console.status_screen import binary_size, duration
    from deploy.serving import prefix_cache

    with exit_on_errors(PROGRAM):
        written = _folders(config)
        if not written:
            typer.echo("with these settings no prompts are written to disk")
        for folder, limit in written.items():
            found, now = prefix_cache.models(folder), time.time()
            total = sum(model.bytes for model in found)
            size = f"{binary_size(total)}, at most {binary_size(limit)} for each model"
            typer.echo(f"{folder}: {size}; {binary_size(prefix_cache.free_bytes(folder))} free")
            for model in found:
                ages = f"{duration(now - model.newest_at)} to {duration(now - model.oldest_at)} old"
                typer.echo(
                    f"{binary_size(model.bytes):>9}  {model.files:>6} files  {ages}  {model.fingerprint}"
                )
        for line in _of_server(host, port, config):
            typer.echo(line)


def clear(host: Host = None, port: Port = None, config: Config = None) -> None:
    """Delete the prefix cache on disk, and in the memory of a server that runs."""
    from deploy.console import http
    from deploy.console.status_screen import binary_size
    from deploy.serving import prefix_cache

    with exit_on_errors(PROGRAM):
        stored = {
            folder: sum(model.bytes for model in prefix_cache.models(folder)) for folder in _folders(config)
        }
        # First the server, which would otherwise keep in memory what is deleted.
        with http.open_client(endpoint(None, host, port, config)) as client:
            refusal = http.clear_cache(client)
        for folder, total in stored.items():
            prefix_cache.clear(folder, time.time())
            typer.echo(f"{folder}: deleted {binary_size(total)}")
        if refusal:
            typer.echo(f"{PROGRAM}: the running server keeps its prefixes in memory: {refusal}", err=True)
            raise typer.Exit(1)


def _of_server(host: str | None, port: int | None, config: Path | None) -> list[str]:
    """Return a line for each worker of the running server with a prefix cache; none without a server."""
    from deploy.console import http
    from deploy.console.status_screen import binary_size

    found = endpoint(None, host, port, config)
    try:
        with http.open_client(found) as client:
            workers = http.get(client, "/v1/status?history=false")["workers"]
    except http.ConsoleError:
        return []
    return [
        f"{binary_size(prefix['ram_bytes']):>9}  in memory of {worker['model']} (pid {worker['pid']}) at"
        f" {found.url}; on disk it may take {binary_size(prefix['disk_limit'])} at present, and write"
        f" {binary_size(prefix['writes_left'])} now, {binary_size(prefix['writes_limit'])} a day"
        for worker in workers
        if (prefix := worker.get("prefix"))
    ]


def _folders(config: Path | None) -> dict[Path, int]:
    from deploy.serving import prefix_cache
    from deploy.serving.resolution import resolve

    resolved = resolve(flags_of(None, None, config), os.environ)
    return prefix_cache.folders(resolved.first_plans, os.environ)
