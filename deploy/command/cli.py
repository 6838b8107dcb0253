"""Assembly of the `roundhouse` command. Each subcommand only reads its arguments and calls the rest."""

from __future__ import annotations

import io
import locale
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from deploy import __file__ as OURS
from deploy.command import adapters, cache, journal, keys, service
from deploy.command.batch import batch
from deploy.command.bench import bench
from deploy.command.chat import chat
from deploy.command.doctor import doctor
from deploy.command.keys import curve_keys
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


# --- before any command ------------------------------------------------------------------------------

EXIT_CONFIGURATION = 78
"""That of `protocol.settings.reader`, which may be hidden."""


def _check_packages() -> None:
    """Exit with a message if Python finds another module than one of ours, whose names are words that other
    programs use too."""
    folder = Path(OURS).parents[1]
    for name in ("protocol", "broker", "worker"):
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin)
        # A package that can be run takes the place of ours on purpose.
        is_runnable = found is not None and found.with_name("__main__.py").exists()
        if found is None or (found.parents[1] != folder and not is_runnable):
            place = found or (list(spec.submodule_search_locations or ()) if spec else "nothing")
            print(
                f"roundhouse: PYTHONPATH hides the package {name!r} of Roundhouse by {place}: "
                "unset it for this command, or rename that module",
                file=sys.stderr,
            )
            raise SystemExit(EXIT_CONFIGURATION)


_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Name and mode of each stream, by its descriptor."""


def _prepare_streams() -> None:
    """Make the standard streams usable, and this process independent of its locale."""
    _open_missing()
    _use_utf8()


def _open_missing() -> None:
    """Open /dev/null in place of each closed standard stream, as after `roundhouse serve <&- >&- 2>&-`.

    Otherwise the next file or socket would take its descriptor, and child processes would use that as theirs.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        if not _is_open(fd):
            # Takes the lowest free number, which is `fd`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _use_utf8() -> None:
    """Read and write UTF-8; in a locale with another encoding, restart this process in Python's UTF-8 mode.

    Only that mode decodes arguments and names of files as UTF-8, and text files that libraries read.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower().replace("-", "") != "utf8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            errors = "strict" if stream is sys.stdin else "backslashreplace"
            stream.reconfigure(encoding="utf-8", errors=errors)


def _check_words(words: list[str]) -> None:
    """Exit with a message if an argument is not UTF-8; none could be sent to a server."""
    from protocol.common.environment import why_no_text
    from protocol.settings.reader import exit_with

    for word in words:
        if why := why_no_text(word):
            exit_with("roundhouse", why)


def main() -> None:
    _prepare_streams()
    _check_packages()
    _check_words(sys.argv[1:])
    app(prog_name="roundhouse")
