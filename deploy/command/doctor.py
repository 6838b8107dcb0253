"""`roundhouse doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from protocol.hosts import Backend

_STYLES = {"ok": "green", "note": "yellow", "wrong": "red"}


def doctor(
    port: Annotated[int | None, typer.Option(help="Port of the gateway to be started.")] = None,
    hosts: Annotated[Path | None, typer.Option(help="Hostfile: check its machines instead.")] = None,
    backend: Annotated[str | None, typer.Option(help="Backend of those machines: ring or jaccl.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Model whose batched passes to compare with passes of one row; with --hosts, a folder that"
            " must exist on each machine."
        ),
    ] = "",
) -> None:
    """Check this machine, and report problems with advice. Exits with status 1 if something will not work."""
    import os

    from rich.console import Console
    from rich.text import Text

    from deploy.machine import doctor as doctoring
    from deploy.machine import facts
    from deploy.machine import hosts as machines
    from deploy.serving import serve
    from protocol import settings
    from protocol.hosts import HostsError, read

    try:
        if hosts is None:
            findings = doctoring.examine(facts.gather(port or serve.port([], os.environ)))
        else:
            known = read(hosts)
            connected: Backend = "jaccl" if (backend or known.backend) == "jaccl" else "ring"
            findings = machines.examine(hosts, known, connected, machines.ask(known, model))
    except (settings.SettingsError, HostsError, OSError) as error:
        settings.exit_with("roundhouse doctor", error)
    console = Console(highlight=False)
    for finding in findings:
        verdict = finding.verdict.value
        head = (f"{verdict:<6}", _STYLES[verdict]), (f"{finding.about:<16}", "bold")
        console.print(Text.assemble(*head, finding.told), soft_wrap=True)
        if finding.advice:
            console.print(f"{'':22}{finding.advice}", style="dim", markup=False, soft_wrap=True)
    is_wrong = any(finding.verdict is doctoring.Verdict.WRONG for finding in findings)
    if model and hosts is None:
        is_wrong |= _compare_passes(model, console)
    raise typer.Exit(is_wrong)


def _compare_passes(model: str, console: Console) -> bool:
    """Print the exactness table of a model. Return whether something is wrong."""
    from rich.text import Text

    from deploy.machine import exactness
    from protocol import settings

    try:
        table = exactness.lines(exactness.measure(model))
    except exactness.MeasurementError as error:
        settings.exit_with("roundhouse doctor", error)
    console.print(f"\n{model}, compared with one row alone:", highlight=False, markup=False)
    for kind, verdict, told in table:
        head = (f"{verdict:<6}", _STYLES[verdict]), (f"{kind:<28}", "bold")
        console.print(Text.assemble(*head, told), soft_wrap=True)
    return any(verdict == "wrong" for _, verdict, _ in table)
