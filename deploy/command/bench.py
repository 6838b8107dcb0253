"""`roundhouse bench`."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command.endpoint import Config, Host, Port
from deploy.command.report import REPORT_FILE, show_and_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deploy.load.client import Target
    from deploy.load.runner import Load
    from deploy.load.samples import Rounds

PROGRAM = "roundhouse bench"
FILE_WIDTH = 140
"""Width of tables when stdout is no terminal."""
KEYS = ("ROUNDHOUSE_API_KEYS", "OPENAI_API_KEY")


def bench(
    url: Annotated[
        str | None, typer.Argument(help="URL of any chat completions endpoint (default: that of serve).")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="URL of a second endpoint, measured alternately with the first.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model (default: the endpoint's first).")] = None,
    compare_model: Annotated[str | None, typer.Option(help="Model of the second endpoint.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight; one run per number.")] = "1,4,16",
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second, instead of --concurrency.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per run (default: twice --concurrency, at least 8).")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens per prompt.")] = 128,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Those of them that all prompts share, as a system message.")
    ] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each run.")] = 3,
    seed: Annotated[str | None, typer.Option(help="Seed of the prompts (default: random).")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="File for JSON results; - prints.")] = None,
    share: Annotated[Path | None, REPORT_FILE] = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
) -> None:
    """Measure an endpoint under load: tokens per second, time to first text, time between pieces of text.

    Prompts are new in every round, except for --shared-tokens, so prefix caches do not help. The API key is
    read from ROUNDHOUSE_API_KEYS or OPENAI_API_KEY. With --share: five fixed figures of a server on this
    machine.
    """
    import asyncio

    from rich.console import Console

    from deploy.load import runner
    from deploy.load.client import TargetError
    from deploy.load.runner import Load, PromptShape
    from protocol.settings import reader as settings

    if share is not None:
        _share(share, url, model, host, port, config)
        return
    if shared_tokens >= prompt_tokens:
        raise typer.BadParameter("--shared-tokens are a part of --prompt-tokens, and must be fewer")
    shape, progress = PromptShape(prompt_tokens, shared_tokens), Console(stderr=True)
    counts = [None] if rate is not None else _numbers(concurrency)
    loads = [
        Load(requests or max(8, 2 * (count or 1)), shape, answer_tokens, count, rate) for count in counts
    ]
    seed = seed or secrets.token_hex(4)
    try:
        sides = asyncio.run(_sides(_first(url, host, port, config), compare, model, compare_model))
        with progress.status("measuring") as status:
            results = asyncio.run(runner.measure(sides, loads, rounds, seed, status.update))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (TargetError, settings.SettingsError, OSError) as error:
        settings.exit_with(PROGRAM, error)
    about = {"seed": seed, "sides": {name: [side.url, side.model] for name, side in sides.items()}}
    _show(results, about, as_json)


def _show(results: Sequence[tuple[Load, Rounds]], about: Mapping[str, object], as_json: Path | None) -> None:
    """Print the results, or write them as JSON."""
    from rich.console import Console

    from deploy.load import report

    written = json.dumps(report.document(results, about), indent=1)
    if as_json is not None and str(as_json) == "-":
        typer.echo(written)
        return
    if as_json is not None:
        as_json.write_text(written + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(report.table(results))
    for line in report.ratios(results):
        console.print(line, highlight=False)
    console.print(report.LEGEND, style="dim")


def _share(
    file: Path, url: str | None, model: str | None, host: str | None, port: int | None, config: Path | None
) -> None:
    """Measure the figures of a report, and write it."""
    import asyncio

    from rich.console import Console

    from deploy.agents.models import LaunchError, is_near
    from deploy.agents.profiles import Endpoint
    from deploy.command.endpoint import exit_on_errors
    from deploy.console import http
    from deploy.load import figures, runner
    from deploy.load.client import Target, TargetError, first_model
    from deploy.machine import facts, report

    with exit_on_errors(PROGRAM, TargetError, LaunchError):
        address, key = _first(url, host, port, config)
        if not is_near(address):
            raise TargetError("--share describes this machine, so the server must run on it")
        target = Target(address, model or asyncio.run(first_model(address, key)), key)
        seed, tell = secrets.token_hex(4), Console(stderr=True).print
        results = asyncio.run(
            runner.measure({target.model: target}, figures.LOADS, figures.ROUNDS, seed, tell)
        )
        if errors := figures.errors(results):
            raise TargetError(f"no figures, because requests failed: {', '.join(errors)}")
        with http.open_client(Endpoint(address, *([key] if key else []))) as client:
            served = report.of_server(target.model, http.get(client, "/v1/status"))
        machine = report.of_machine(facts.gather("127.0.0.1", 0))
        document = {"object": "bench", **machine, **served, "figures": figures.figures(results)}
        show_and_write(document, file)


def _numbers(text: str) -> list[int | None]:
    try:
        found: list[int | None] = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or any(number is None or number < 1 for number in found):
        raise typer.BadParameter(f"--concurrency {text!r}: must be positive numbers, such as 1,4,16")
    return found


def _first(
    url: str | None, host: str | None, port: int | None, config: Path | None
) -> tuple[str, str | None]:
    """Return URL and key of the first side. Raises `SettingsError` or `OSError`."""
    if url is not None:
        return _without_server(url), _key()
    from deploy.command.endpoint import endpoint

    found = endpoint(None, host, port, config)
    return found.url, found.key


def _without_server(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _key() -> str | None:
    keys = (word for name in KEYS for word in os.environ.get(name, "").split(",") if word)
    return next(keys, None)


async def _sides(
    first: tuple[str, str | None], compare: str | None, model: str | None, compare_model: str | None
) -> dict[str, Target]:
    """Return the sides, named by address, or by model if both have the same address. Raises `TargetError`."""
    from deploy.load.client import Target, first_model

    url, key = first
    sides = [Target(url, model or await first_model(url, key), key)]
    if compare is not None:
        other = _without_server(compare)
        sides.append(Target(other, compare_model or await first_model(other, _key()), _key()))
    if len({side.url for side in sides}) == len(sides):
        return {side.url.partition("://")[2]: side for side in sides}
    names = [f"{number}: {side.model}" for number, side in enumerate(sides, 1)]
    return dict(zip(names, sides, strict=True))
