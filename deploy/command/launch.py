"""`roundhouse launch`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Annotated, NoReturn

import typer

from deploy.agents import profiles
from deploy.agents.profiles import Agent, AgentProfile
from deploy.command.endpoint import Config, Host, Port, Url, endpoint, exit_on_errors

PROGRAM = "roundhouse launch"


def launch(
    agent: Annotated[Agent | None, typer.Argument(help="The agent to start.", show_default=False)] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the agent, after --.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model, by the name that clients use (default: the first loaded one).")
    ] = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the environment for the agent, or for any other client.")
    ] = False,
) -> None:
    """Start a coding agent with a model of a running serve.

    Endpoint and model are passed in the agent's environment and on its command line. No file is written; the
    agent's own settings stay in force, except for endpoint and model.
    """
    from deploy.agents import models
    from deploy.console import http

    if agent is None and not show:
        raise typer.BadParameter(f"name an agent ({', '.join(Agent)}), or use --print for any other client")
    with exit_on_errors(PROGRAM, models.LaunchError):
        found = endpoint(url, host, port, config)
        chosen = models.choose(http.models_of(found), model)
    setup = agent.setup(found, chosen) if agent else profiles.anybody(found, chosen)
    if agent is None or show:
        typer.echo(profiles.shell_text(setup, agent))
        return
    _become(agent, setup, args or [], os.environ)


def _become(agent: Agent, setup: AgentProfile, args: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process with the agent, which gets terminal, signals and exit status."""
    from protocol.settings import reader as settings

    program = shutil.which(agent)
    if program is None:
        settings.exit_with(PROGRAM, f"{agent} is not installed: npm install -g {agent.package}")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and `execve` inherits that
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(program, [agent, *setup.words, *args], setup.environment(environ))
