"""`serve` as a typer command: help and completion show what `protocol.settings.reader` reads."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from protocol.settings.reader import Flag


class SettingsCommand(TyperCommand):
    """Command whose flags are the settings of `serve`, shown in groups.

    They are only made for help and completion, because they take the imports of `serve`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave every word to the command, except for --help."""
        if {"--help", "-h"} & set(args) and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        ctx.args = list(args)
        return list(args)

    def get_params(self, ctx: Any) -> list[Any]:
        return [*_options(), *super().get_params(ctx)]


def _options() -> list[Any]:
    """Return the flags of `serve` as typer makes them for a function with these parameters."""
    from deploy.serving.settings import GROUPS, shown_flags
    from protocol.settings.reader import CONFIG_FLAG

    found = {flag.field: flag for flag in (CONFIG_FLAG, *shown_flags())}
    shown = [_parameter(found[field], group) for group, names in GROUPS.items() for field in names.split()]

    def command() -> None: ...

    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shown}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return list(typer.main.get_command(app).params)


def _parameter(flag: Flag, group: str) -> inspect.Parameter:
    from rich.markup import escape

    kind = str | None if flag.metavar else bool
    names = [name for name in flag.names if not name.startswith("--no-")]
    option = typer.Option(
        *names,
        metavar=flag.metavar or None,
        help=escape(flag.help),
        rich_help_panel=group,
        show_default=False,
    )
    default = None if flag.metavar else False
    return inspect.Parameter(
        flag.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
