"""Writing of a report for others, which the user sees first."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

REPORT_FILE = typer.Option(
    metavar="FILE", help="Show a report for others, and write it to this file. - only shows it."
)


def show_and_write(report: Mapping[str, Any], file: Path) -> None:
    """Print `report`; write it to `file` once it is confirmed, in a terminal. Raises `OSError`."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    typer.echo(text)
    if str(file) == "-":
        return
    if sys.stdin.isatty() and not typer.confirm(f"Nothing else is in the report. Write it to {file}?"):
        return
    file.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"written to {file}; nothing has been sent", err=True)
