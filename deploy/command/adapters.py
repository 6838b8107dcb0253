"""`roundhouse adapters`: the adapters of a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.command.endpoint import Config, Host, Port, Url, endpoint, exit_on_errors

PROGRAM = "roundhouse adapters"
WAIT_S_MAX = 150.0
"""Timeout of a request: longer than the server waits for its workers."""

Ask = Callable[..., dict[str, Any]]

Model = Annotated[str | None, typer.Option(help="Model of the adapter (default: the only one).")]


def show(url: Url = None, host: Host = None, port: Port = None, config: Config = None) -> None:
    """List the adapters that the server has."""
    from deploy.console.status_screen import size

    with _server(url, host, port, config) as ask:
        for adapter in ask("GET", "/v1/adapters")["data"]:
            typer.echo(f"{adapter['id']}  rank {adapter['rank']}  {size(adapter['bytes'])}")


def add(
    name: Annotated[str, typer.Argument(help="Name for clients: they ask for MODEL:NAME.")],
    folder: Annotated[Path, typer.Argument(help="Folder of mlx-lm or PEFT, on the server's machine.")],
    model: Model = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
) -> None:
    """Load an adapter. Running requests are not interrupted."""
    from protocol.common.model_folder import expand_user

    body = {"name": name, "folder": str(expand_user(folder).absolute())} | ({"model": model} if model else {})
    with _server(url, host, port, config) as ask:
        added = ask("POST", "/v1/adapters", json=body)
        typer.echo(f"{added['id']} is served")


def rm(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    model: Model = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
) -> None:
    """Remove an adapter. Requests that use it finish."""
    with _server(url, host, port, config) as ask:
        removed = ask("DELETE", f"/v1/adapters/{name}", params={"model": model} if model else {})
        users = removed["requests"]
        waits = f"; {users} running request{'s' if users > 1 else ''} still use it" if users else ""
        typer.echo(f"{removed['model']}:{removed['name']} is removed{waits}")


@contextlib.contextmanager
def _server(url: str | None, host: str | None, port: int | None, config: Path | None) -> Iterator[Ask]:
    """Yield a function that asks the server. A refusal ends the process."""
    from deploy.console import http

    errors = exit_on_errors(PROGRAM, http.ConsoleError)
    with errors, http.open_client(endpoint(url, host, port, config)) as client:
        yield partial(http.ask, client, timeout=WAIT_S_MAX)
