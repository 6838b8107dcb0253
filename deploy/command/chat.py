"""`roundhouse chat`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.command.endpoint import Config, Host, Port, Url, endpoint

PROGRAM = "roundhouse chat"


def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A question; without one, start a conversation.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name (default: the first loaded one).")] = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    image: Annotated[list[Path] | None, typer.Option(help="Image file to send with the question.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per answer.")] = None,
    history: Annotated[bool, typer.Option(help="Save the typed lines in a private history file.")] = True,
) -> None:
    """Chat with a model: Markdown, multi-line input, images by path, reasoning folded. /help lists commands.

    With a question as argument or from a pipe, only its answer is printed.
    """
    from rich.console import Console

    from deploy.agents import models
    from deploy.console import chat_repl, http
    from deploy.console.chat_repl import Conversation, ImageError, read_image
    from protocol.settings import reader as settings

    console, question = Console(highlight=False), " ".join(words or ())
    if not sys.stdin.isatty():
        question = "\n\n".join(part for part in (question, _piped()) if part)
        if not question:
            settings.exit_with(PROGRAM, "the question is empty: pass it as an argument or through a pipe")
    fields: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    parameters = {name: value for name, value in fields.items() if value is not None}
    try:
        found = endpoint(url, host, port, config)
        chosen = models.choose(http.models_of(found), model)
        with http.open_client(found) as client:
            talking = chat_repl.ChatRepl(client, console, chosen.id, Conversation(system), parameters)
            if question:
                talking.say(question, image or (), draw=console.is_terminal)
                return
            console.print(f"{chosen.id} at {found.url}. /help lists commands.", style="dim", markup=False)
            talking.images += [read_image(path) for path in image or ()]
            with chat_repl.lines_with_history(_history_file(os.environ) if history else None) as read_line:
                talking.run(read_line)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (models.LaunchError, settings.SettingsError, ImageError, OSError) as error:
        settings.exit_with(PROGRAM, error)


def _piped() -> str:
    """Return the text on stdin. Exits with a message if it is not UTF-8."""
    from protocol.settings import reader as settings

    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        settings.exit_with(PROGRAM, f"the question on standard input is not UTF-8: {error}")


def _history_file(environ: Mapping[str, str]) -> Path:
    """Return the history file."""
    from protocol.common.state_folder import state_folder

    return state_folder(environ) / "chat_history"
