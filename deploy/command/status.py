"""`roundhouse status`."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.command.endpoint import Config, Host, Port, Url, endpoint

PROGRAM = "roundhouse status"


def status(
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once (the default if stdout is no terminal).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document of /v1/status.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=60.0, help="Refresh interval in seconds.")] = 1.0,
) -> None:
    """Show models, requests, throughput and recent errors. Ctrl-C ends it."""
    from threading import Event

    from rich.console import Console

    from deploy.console import http, status_screen
    from protocol.settings import reader as settings

    console = Console()
    try:
        with http.open_client(endpoint(url, host, port, config)) as client:
            if as_json:
                console.print_json(data=http.get(client, "/v1/status"))
            elif once or not console.is_terminal:
                status_screen.show(console, lambda: http.get(client, "/v1/status"))
            else:
                status_screen.watch(console, lambda: http.get(client, "/v1/status"), every, Event())
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except (http.ConsoleError, settings.SettingsError, OSError) as error:
        settings.exit_with(PROGRAM, error)
