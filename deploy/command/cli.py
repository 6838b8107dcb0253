"""Assembly of the `roundhouse` command. Each subcommand only reads its arguments and calls the rest."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deploy.command import adapters, cache, journal, keys, own_packages, service, standard_streams
from deploy.command.batch import batch
from deploy.command.bench import bench
from deploy.command.chat import chat
from deploy.command.curve_keys import curve_keys
from deploy.command.doctor import doctor
from deploy.command.launch import launch
from deploy.command.models import ls, pull, rm, suggested
from deploy.command.reload import reload
from deploy.command.run import run
from deploy.command.serve import gateway, serve, worker
from deploy.command.settings_command import SettingsCommand
from deploy.command.status import status

DISTRIBUTION = "mlx-roundhouse"

# Commands import their dependencies when they are called, so that --help is fast.

# The three processes parse their own flags with `protocol.settings.reader`, so that flags, variables and the
# file always agree; typer passes on every word, including --help.
OWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"roundhouse {importlib.metadata.version(DISTRIBUTION)}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _app() -> typer.Typer:
    app = typer.Typer(
        name="roundhouse",
        help="An OpenAI-compatible server for MLX models whose streams survive worker crashes.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    app.command(cls=SettingsCommand)(serve)
    app.command()(run)
    app.command()(status)
    app.command()(chat)
    app.command()(batch)
    app.command()(bench)
    app.command("models")(suggested)
    for command in (pull, ls, rm, doctor, reload):
        app.command()(command)
    app.command()(launch)
    app.command(context_settings=OWN_FLAGS)(gateway)
    app.command(context_settings=OWN_FLAGS)(worker)
    app.add_typer(_keys(), name="keys")
    app.add_typer(_cache(), name="cache")
    app.add_typer(_journal(), name="journal")
    app.add_typer(_adapters(), name="adapters")
    app.command()(curve_keys)
    app.add_typer(_services(), name="service")
    return app


def _keys() -> typer.Typer:
    commands = typer.Typer(help="Create, list and revoke the API keys of clients.", no_args_is_help=True)
    commands.command()(keys.create)
    commands.command("list")(keys.show)
    commands.command()(keys.revoke)
    return commands


def _adapters() -> typer.Typer:
    commands = typer.Typer(
        help="List, add and remove the adapters of a running server.", no_args_is_help=True
    )
    commands.command("list")(adapters.show)
    commands.command()(adapters.add)
    commands.command()(adapters.rm)
    return commands


def _cache() -> typer.Typer:
    commands = typer.Typer()
    commands.callback(invoke_without_command=True)(cache.cache)
    commands.command()(cache.clear)
    return commands


def _journal() -> typer.Typer:
    commands = typer.Typer()
    commands.callback(invoke_without_command=True)(journal.journal)
    commands.command()(journal.clear)
    return commands


def _services() -> typer.Typer:
    services = typer.Typer(
        help="Run the server as a service: launchd on macOS, systemd on Linux.", no_args_is_help=True
    )
    services.command(context_settings=PASSED_ON)(service.install)
    services.command()(service.remove)
    services.command()(service.status)
    return services


app = _app()


def _check_words(words: list[str]) -> None:
    """Exit with a message if an argument is not UTF-8; none could be sent to a server."""
    from protocol.common.environment import why_no_text
    from protocol.settings.reader import exit_with

    for word in words:
        if why := why_no_text(word):
            exit_with("roundhouse", why)


def main() -> None:
    standard_streams.prepare()
    own_packages.check()
    _check_words(sys.argv[1:])
    app(prog_name="roundhouse")
