"""`roundhouse doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

_STYLES = {"ok": "green", "note": "yellow", "wrong": "red"}


def doctor(
    port: Annotated[int | None, typer.Option(help="Where a gateway is to listen.")] = None,
) -> None:
    """Look at this machine, and say what is wrong and what to do. Status 1 where something will not work."""
    import os

    from rich.console import Console
    from rich.text import Text

    from deploy.machine import doctor as doctoring
    from deploy.machine import facts
    from deploy.serving import serve
    from protocol import settings

    try:
        looked_at = port or serve.port([], os.environ)
    except (settings.SettingsError, OSError) as error:
        settings.exit_with("roundhouse doctor", error)
    console = Console(highlight=False)
    findings = doctoring.examine(facts.gather(looked_at))
    for finding in findings:
        verdict = finding.verdict.value
        head = (f"{verdict:<6}", _STYLES[verdict]), (f"{finding.about:<16}", "bold")
        console.print(Text.assemble(*head, finding.told), soft_wrap=True)
        if finding.advice:
            console.print(f"{'':22}{finding.advice}", style="dim", markup=False, soft_wrap=True)
    raise typer.Exit(any(finding.verdict is doctoring.Verdict.WRONG for finding in findings))
