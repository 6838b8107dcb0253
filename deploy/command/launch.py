"""`roundhouse launch`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Annotated, NoReturn

import typer

from deploy.agents import setups
from deploy.agents.setups import Agent, Setup
from deploy.command.reach import Config, Port, Url, endpoint

PROGRAM = "roundhouse launch"


def launch(
    agent: Annotated[Agent | None, typer.Argument(help="Which one.", show_default=False)] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="What the agent is told; after --.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of several models, by the name that clients use.")
    ] = None,
    url: Url = None,
    port: Port = None,
    config: Config = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the environment that an agent, or any client, needs.")
    ] = False,
) -> None:
    """Start an agent that works with the models of a running serve.

    It is told by its environment and its command line where they are; no file is written, and what is set in
    the agent's own files holds, but for endpoint and model.
    """
    from deploy.agents import models
    from protocol import settings

    if agent is None and not show:
        raise typer.BadParameter(f"say which agent ({', '.join(Agent)}), or --print for any other client")
    try:
        found = endpoint(url, port, config)
        chosen = models.choose(models.ask(found), model)
    except (models.LaunchError, settings.SettingsError, OSError) as error:
        settings.exit_with(PROGRAM, error)
    setup = agent.setup(found, chosen) if agent else setups.anybody(found, chosen)
    if agent is None or show:
        typer.echo(setups.shell_text(setup, agent))
        return
    _become(agent, setup, args or [], os.environ)


def _become(agent: Agent, setup: Setup, args: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """The agent takes our place: terminal, signals and exit status are its own."""
    from protocol import settings

    program = shutil.which(agent)
    if program is None:
        settings.exit_with(PROGRAM, f"{agent} is not installed: npm install -g {agent.package}")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; what is ignored stays so in a new program
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(program, [agent, *setup.words, *args], setup.environment(environ))
