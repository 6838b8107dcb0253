"""`roundhouse pull`, `ls` and `rm`: models at hand, in the cache of Hugging Face."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer


def pull(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Ids, as OWNER/NAME; none: those that fit here are told.", show_default=False),
    ] = None,
) -> None:
    """Fetch models from Hugging Face, or what is missing of them; one that was begun goes on."""
    from deploy.machine import hub
    from protocol import settings

    if not models:
        _suggest()
        return
    for model in models:
        try:
            needed = hub.missing_bytes(model)
            if needed:
                hub.check_room(model, needed, _free_bytes())
                typer.echo(f"{model}: {needed / 1e9:.2f} GB to fetch")
            path = hub.pull(model)
        except hub.HubError as error:
            settings.exit_with("roundhouse pull", error)
        typer.echo(f"{model} is in {path}")
        typer.echo(f"roundhouse serve --model {model}")


def ls() -> None:
    """Show the models that are here, and what they take."""
    from datetime import datetime

    from rich.console import Console

    from deploy.console.table import size
    from deploy.machine import hub

    held = hub.held()
    if not held:
        typer.echo(f"no models in {hub.folder()}; `roundhouse pull` tells which fit here")
        return
    console = Console(highlight=False)
    for model in held:
        used = datetime.fromtimestamp(model.used_at).strftime("%Y-%m-%d")
        broken = "" if model.whole else "  not whole, or no model for MLX"
        console.print(f"{size(model.bytes):>9}  {used}  {model.id}{broken}", markup=False, soft_wrap=True)
    total = sum(model.bytes for model in held)
    console.print(f"{size(total):>9}  in {hub.folder()}, {size(_free_bytes())} left", soft_wrap=True)


def rm(
    models: Annotated[list[str], typer.Argument(help="Ids, as `roundhouse ls` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models from this machine."""
    from deploy.console.table import size
    from deploy.machine import hub
    from protocol import settings

    sizes = {model.id: model.bytes for model in hub.held()}
    try:
        if not yes and all(model in sizes for model in models):
            total = sum(sizes[model] for model in models)
            typer.confirm(f"remove {', '.join(models)} ({size(total)})?", abort=True)
        freed = hub.remove(models)
    except hub.HubError as error:
        settings.exit_with("roundhouse rm", error)
    typer.echo(f"removed {', '.join(models)}: {size(freed)}")


def _suggest() -> None:
    from deploy.console.table import size
    from deploy.machine import memory, suggestions

    room = memory.look().for_model
    typer.echo(f"{size(room)} for a model and its caches. What fits, the largest first:")
    for each, context in suggestions.that_fit(room):
        typer.echo(f"{size(each.weight_bytes):>9}  {context:>9,} tokens  {each.id}  ({each.about})")


def _free_bytes() -> int:
    """Where models are, or will be."""
    from deploy.machine import hub

    there = hub.folder()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
