"""The `roundhouse` command. Thin: each command reads what it was told and hands over."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deploy.serving import serve as serving
from deploy.supervisor import control
from deploy.supervisor.reloading import Order
from deploy.supervisor.supervisor import Supervisor
from deploy.units import launchd, service, systemd
from protocol import logs, settings, sockets
from protocol.naming import folder_of

DISTRIBUTION = "mlx-roundhouse"
KEY_FILES = ("gateway.key", "gateway.key_secret", "worker.key", "worker.key_secret")

# The three processes read their own flags, with `protocol.settings`, so that flags, variables and the file
# never drift apart; typer passes every word on, --help included.
OWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    name="roundhouse",
    help="An OpenAI-compatible server for MLX models that keeps the line open.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
services = typer.Typer(help="Run it as a service: launchd on macOS, systemd on Linux.", no_args_is_help=True)
app.add_typer(services, name="service")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"roundhouse {importlib.metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=OWN_FLAGS)
def serve(context: typer.Context) -> None:
    """Run the gateway and a worker for each model, supervised, in the foreground."""
    try:
        given, children = serving.read(context.args, os.environ)
        path = control.path_for(serving.port(context.args, os.environ))
    except (settings.SettingsError, sockets.EndpointError, OSError) as error:
        settings.exit_with(serving.PROGRAM, str(error))
    logs.setup("serve", given.log_format or "text", given.log_level or "info")
    status = Supervisor(
        children,
        stop_timeout_s=given.stop_timeout_s,
        limits=given.restart_limits(),
        reloading=given.reloading(path),
        memory_budget=given.memory_budget,
    ).run()
    logging.getLogger(__name__).info("all stopped, exit status %d", status)
    raise typer.Exit(status)


@app.command()
def reload(
    port: Annotated[int | None, typer.Option(help="Where the gateway of that serve listens.")] = None,
    config: Annotated[Path | None, typer.Option(help="The TOML file of that serve.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of several models, by the name that clients use; none: all.")
    ] = None,
    swap_for: Annotated[
        str | None,
        typer.Option("--with", help="Serve this model, an id or a folder, under that name from now on."),
    ] = None,
) -> None:
    """Have a running serve replace workers by new processes, without the loss of a request.

    A new worker starts beside the old one where memory allows, else after it. One that does not get ready
    leaves the old one in place. Status 1 when a worker was not replaced. Where another model takes its place,
    the old one ends the requests it has. Which models there are is read when serve starts, and not again:
    what is swapped here is to be changed in the TOML file too. Under launchd or systemd the old worker ends
    first, and who asks before the new one is ready gets a 503.
    """
    program = "roundhouse reload"
    flags = [f"--{name}={value}" for name, value in (("port", port), ("config", config)) if value is not None]
    try:
        order = Order(model, swap_for and _from_here(swap_for))
        done, text = _order_reload(control.path_for(serving.port(flags, os.environ)), order)
    except (
        settings.SettingsError,
        sockets.EndpointError,
        control.ControlError,
        service.ServiceError,
        OSError,
    ) as error:
        settings.exit_with(program, str(error))
    typer.echo(text, err=not done)
    raise typer.Exit(0 if done else 1)


def _from_here(model: str) -> str:
    """The folder that is meant: `serve` may have been started in another one."""
    return str(folder_of(model).resolve()) if folder_of(model).exists() else model


def _order_reload(path: Path, order: Order) -> tuple[bool, str]:
    try:
        return control.order(path, order)
    except control.NobodyListensError:
        if order == Order() and (names := service.reload(_manager())):
            return True, f"restarted {', '.join(names)}"
        raise


@app.command(context_settings=OWN_FLAGS)
def gateway(context: typer.Context) -> None:
    """Be the gateway process, as launchd and systemd run it. Takes its flags; see gateway --help."""
    _become("broker", context.args)


@app.command(context_settings=OWN_FLAGS)
def worker(context: typer.Context) -> None:
    """Be a worker process, as launchd and systemd run it. Takes its flags; see worker --help."""
    _become("worker", context.args)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
) -> None:
    """Write the CURVE keys that gateway and worker need for a tcp:// endpoint off loopback."""
    program = "roundhouse keys"
    if existing := [name for name in KEY_FILES if (folder / name).exists()]:
        settings.exit_with(program, f"{folder} already holds {', '.join(existing)}")
    try:
        sockets.write_keys(folder)
    except OSError as error:
        settings.exit_with(program, str(error))
    typer.echo(f"Keys of both ends are in {folder}. Whoever can read them may join the line.")


@services.command(context_settings=PASSED_ON)
def install(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and change nothing.")] = False,
) -> None:
    """Start gateway and worker at login and keep them running. Takes the flags of serve: see serve --help."""
    with _service_errors():
        manager, jobs = _manager(), service.read(context.args, os.environ)
        if dry_run:
            for name, text in manager.files(service.masked(jobs)).items():
                typer.echo(f"# {manager.folder / name}\n{text}")
            return
        changed = service.install(manager, jobs)
        typer.echo(
            "\n".join(f"installed {manager.folder / name}" for name in changed) or "nothing has changed"
        )
        typer.echo(manager.hint())


@services.command()
def remove() -> None:
    """Stop what is installed and remove all of it."""
    with _service_errors():
        manager = _manager()
        names = service.remove(manager)
        typer.echo("\n".join(f"removed {manager.folder / name}" for name in names) or "nothing was installed")


@services.command()
def status() -> None:
    """Say what is installed, what runs, since when, and how it last ended. Status 1 unless all runs."""
    with _service_errors():
        lines, runs = service.status(_manager())
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if runs else 1)


def _manager() -> service.Manager:
    if sys.platform == "darwin":
        return launchd.for_this_user()
    return systemd.for_this_user()


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except (settings.SettingsError, sockets.EndpointError, service.ServiceError, OSError) as error:
        settings.exit_with(service.PROGRAM, str(error))


def _become(module: str, argv: list[str]) -> NoReturn:
    command = [*serving.python_module(module), *argv]
    os.execv(command[0], command)


def main() -> None:
    app(prog_name="roundhouse")
