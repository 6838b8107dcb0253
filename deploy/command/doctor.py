"""`roundhouse doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command.endpoint import exit_on_errors, flags_of
from deploy.command.report import REPORT_FILE, show_and_write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from protocol.hosts import Backend
    from protocol.types import ModelReport

_STYLES = {"ok": "green", "note": "yellow", "wrong": "red"}


def doctor(
    host: Annotated[str | None, typer.Option(help="Address of the gateway to be started.")] = None,
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
    kv_bits: Annotated[int | None, typer.Option(help="With --model: as of `serve`.")] = None,
    kv_group_size: Annotated[int | None, typer.Option(help="With --model: as of `serve`.")] = None,
    report: Annotated[Path | None, REPORT_FILE] = None,
) -> None:
    """Check this machine, and report problems with advice. Exits with status 1 if something will not work."""
    import os

    from rich.console import Console
    from rich.text import Text

    from deploy.machine import doctor as doctoring
    from deploy.machine import facts
    from deploy.machine import hosts as machines
    from deploy.serving.resolution import resolve_gateway
    from protocol.hosts import HostsError, read

    machine = None
    if report is not None and hosts is not None:
        raise typer.BadParameter("--report is of this machine, and --hosts checks others")
    with exit_on_errors("roundhouse doctor", HostsError):
        if hosts is None:
            found = resolve_gateway(flags_of(host, port, None), os.environ)
            machine = facts.gather(found.host, found.port)
            findings = doctoring.examine(machine)
        else:
            known = read(hosts)
            connected: Backend = "jaccl" if (backend or known.backend) == "jaccl" else "ring"
            findings = machines.examine(hosts, known, connected, machines.ask(known, model))
    console = Console(highlight=False)
    for finding in findings:
        verdict = finding.verdict.value
        head = (f"{verdict:<6}", _STYLES[verdict]), (f"{finding.about:<16}", "bold")
        console.print(Text.assemble(*head, finding.text), soft_wrap=True)
        if finding.advice:
            console.print(f"{'':22}{finding.advice}", style="dim", markup=False, soft_wrap=True)
    is_wrong = any(finding.verdict is doctoring.Verdict.WRONG for finding in findings)
    passes = None
    if model and machine is not None:
        typer.echo(f"loading {model} and comparing its passes, which takes minutes", err=True)
        kv = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
        passes, model_is_wrong = _measure(model, kv, console)
        is_wrong |= model_is_wrong
    if report is not None and machine is not None:
        from deploy.machine import report as reports

        document = {
            "object": "doctor",
            **reports.of_machine(machine),
            "findings": reports.of_findings(findings, str(Path.home())),
        }
        if passes is not None:
            document["passes"] = reports.of_passes(model, passes)
        with exit_on_errors("roundhouse doctor"):
            show_and_write(document, report)
    raise typer.Exit(is_wrong)


def _measure(model: str, kv: Mapping[str, int | None], console: Console) -> tuple[ModelReport, bool]:
    """Print the context that fits beside a model, and its exactness table. Return what was measured, and
    whether something is wrong. `kv`: settings of its KV caches besides those of the settings file."""
    import os

    from rich.text import Text

    from deploy.machine import doctor
    from deploy.serving.commandlines import flag_words

    flags = [word for name, value in kv.items() for word in flag_words(name, value)]
    with exit_on_errors("roundhouse doctor", doctor.MeasurementError):
        found = doctor.measure(model, flags, os.environ)
    if found.context is not None:
        fits, sentence = doctor.context(found.context)
        about = (f"{fits:<6}", _STYLES[fits]), (f"{'context':<16}", "bold")
        console.print(Text.assemble(*about, sentence), soft_wrap=True)
    for verdict, subject, sentence in doctor.output(found.capabilities):
        about = (f"{verdict:<6}", _STYLES[verdict]), (f"{subject:<16}", "bold")
        console.print(Text.assemble(*about, sentence), soft_wrap=True)
    table = doctor.lines(found.exactness)
    console.print(f"\n{model}, compared with one row alone:", highlight=False, markup=False)
    for kind, verdict, text in table:
        head = (f"{verdict:<6}", _STYLES[verdict]), (f"{kind:<28}", "bold")
        console.print(Text.assemble(*head, text), soft_wrap=True)
    return found, any(verdict == "wrong" for _, verdict, _ in table)
