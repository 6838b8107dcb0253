"""`roundhouse models`, `pull`, `ls` and `rm`: models that fit, and those in the Hugging Face cache."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Model ids, as OWNER/NAME; without any, list models that fit this machine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download models from Hugging Face. An interrupted download is continued."""
    from deploy.machine import hub
    from protocol.common.model_folder import POCKET
    from protocol.settings import reader as settings

    if not models:
        suggested()
        return
    for model in models:
        if model == POCKET:
            typer.echo(f"{POCKET} is the embedded model and needs no download: roundhouse serve")
            continue
        try:
            needed = hub.missing_bytes(model)
            if needed:
                typer.echo(f"{model}: downloading {needed / 1e9:.2f} GB")
            path = hub.pull(model)
        except hub.HubError as error:
            settings.exit_with("roundhouse pull", error)
        typer.echo(f"{model} is in {path}")
        typer.echo(f"to serve it: roundhouse serve --model {model}")


def ls() -> None:
    """List the downloaded models with their sizes."""
    from datetime import datetime

    from rich.console import Console

    from deploy.console.status_screen import size
    from deploy.machine import hub
    from deploy.serving.prefix_cache import free_bytes

    held = hub.held()
    if not held:
        typer.echo(f"no models in {hub.folder()}; `roundhouse models` lists those that fit this machine")
        return
    console = Console(highlight=False)
    for model in held:
        used = datetime.fromtimestamp(model.used_at).strftime("%Y-%m-%d")
        broken = "" if model.whole else "  incomplete, or not an MLX model"
        console.print(f"{size(model.bytes):>9}  {used}  {model.id}{broken}", markup=False, soft_wrap=True)
    total = sum(model.bytes for model in held)
    free = size(free_bytes(hub.folder()))
    console.print(f"{size(total):>9}  in {hub.folder()}, {free} free", soft_wrap=True)


def rm(
    models: Annotated[list[str], typer.Argument(help="Model ids, as listed by `roundhouse ls`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove models from this machine."""
    from deploy.console.status_screen import size
    from deploy.machine import hub
    from protocol.settings import reader as settings

    sizes = {model.id: model.bytes for model in hub.held()}
    try:
        if not yes and all(model in sizes for model in models):
            total = sum(sizes[model] for model in models)
            typer.confirm(f"remove {', '.join(models)} ({size(total)})?", abort=True)
        freed = hub.remove(models)
    except hub.HubError as error:
        settings.exit_with("roundhouse rm", error)
    typer.echo(f"removed {', '.join(models)}: {size(freed)} freed")


def suggested() -> None:
    """List models that fit this machine: weights, the context that then fits, and the expected speed."""
    from deploy.console.status_screen import size
    from deploy.machine import facts, suggestions

    room, chip = facts.read_memory(gpu_bytes=facts.gpu_bytes()).for_model, facts.chip_name()
    where = f"{chip}: " if chip else ""
    typer.echo(f"{where}{size(room)} for a model and its caches. Models that fit, largest first:")
    typer.echo("  weights    context  tokens/s  model")
    for fit in suggestions.models_that_fit(room, chip):
        speed = "" if fit.tokens_per_s is None else f"{fit.tokens_per_s:.0f}"
        model = fit.model
        typer.echo(
            f"{size(model.weight_bytes):>9}  {fit.context:>9,}  {speed:>8}  {model.id}  ({model.about})"
        )
    reckoned = "tokens/s: from the bandwidth of the memory, for one short request" if chip else ""
    typer.echo("; ".join(filter(None, (f"list of {suggestions.LIST.date}", reckoned))))
    typer.echo("to download and serve one: roundhouse serve --model ID")
