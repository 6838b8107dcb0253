"""`roundhouse batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.command.endpoint import Config, Host, Port, Url, endpoint

if TYPE_CHECKING:
    import httpx

    from deploy.agents.profiles import Endpoint
    from deploy.console.batch import BatchFile

PROGRAM = "roundhouse batch"


def batch(
    file: Annotated[Path, typer.Argument(help="File with one request in each line, in either API's format.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File for the results (default: FILE.results.jsonl).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to serve if no server runs (default: the embedded one).")
    ] = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
) -> None:
    """Run a file of requests as a batch, and save the results.

    Without --url, and if no server runs, one is started for the time. After an interruption, the same command
    goes on: what has been answered is not computed again.
    """
    import httpx

    from deploy.command.run import RunError
    from deploy.console.batch import read_file
    from deploy.console.http import ConsoleError, open_client
    from protocol.settings import reader as settings

    target = out or file.with_name(file.name.removesuffix(".jsonl") + ".results.jsonl")
    try:
        asked, found = read_file(file), endpoint(url, host, port, config)
        with _served(found, model, starts=url is None), open_client(found) as http:
            failed = _run(http, asked, target)
    except KeyboardInterrupt:
        typer.echo("\nInterrupted; the same command goes on with the batch.", err=True)
        raise typer.Exit(130) from None
    except httpx.TransportError as error:
        settings.exit_with(PROGRAM, f"cannot connect to {found.url}: {error}")
    except (ConsoleError, RunError, settings.SettingsError, OSError) as error:
        settings.exit_with(PROGRAM, error)
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _served(found: Endpoint, model: str | None, *, starts: bool) -> Iterator[None]:
    """Run a server while the context is open, if none is there and one may be started."""
    from deploy.command.run import address, server
    from deploy.serving import models
    from deploy.serving.preflight import is_taken

    if not starts or is_taken(*address(found)):
        yield
        return
    with server(found, model, models.model_of_flag(model).name):
        yield


def _run(http: httpx.Client, file: BatchFile, out: Path) -> int:
    """Run the batch to its end; return the number of requests without a good answer."""
    from deploy.console import batch as console
    from deploy.console.http import ConsoleError

    id = console.find(http, file)
    if id is not None:
        typer.echo(f"Going on with {id}.", err=True)
    id = id or console.create(http, file)
    document = _watched(http, file, id)
    if lines := console.faults(document):
        file.memory.unlink(missing_ok=True)
        for line in lines:
            typer.echo(line, err=True)
        raise ConsoleError(f"{file.path} cannot be run")
    console.save(http, file, document, out)
    counts = document["request_counts"]
    failed = sum(counts.get(name, 0) for name in ("failed", "errored", "canceled", "expired"))
    status = document.get("status", "completed")
    typer.echo(f"{status}: {failed} of {_total(counts)} requests failed; the results are in {out}", err=True)
    return failed or int(status != "completed")


def _total(counts: dict[str, Any]) -> int:
    return int(counts["total"]) if "total" in counts else sum(counts.values())


def _watched(http: httpx.Client, file: BatchFile, id: str) -> dict[str, Any]:
    """Show the progress of a batch until it is over; return its last state."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from deploy.console.batch import watch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    document: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(id, total=None)
        for seen in watch(http, file, id):
            document = seen.document
            bar.update(task, description=f"{id} {seen.status}", total=seen.total or None, completed=seen.done)
    return document
