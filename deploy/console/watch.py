"""Display of the status: once, or refreshed on a separate screen until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.console import table
from deploy.console.http import ConsoleError

Look = Callable[[], dict[str, Any]]
"""Returns the document of `/v1/status`. Raises `ConsoleError`."""


def show(console: Console, look: Look) -> None:
    """Print the status once. Raises `ConsoleError`."""
    console.print(table.screen(look()))


def watch(console: Console, look: Look, every_s: float, stop: Event) -> None:
    """Refresh the status until `stop`. An error is shown above the last status."""
    seen: RenderableType = Text()
    with Live(seen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                seen = table.screen(look())
                live.update(seen, refresh=True)
            except ConsoleError as error:
                told = Text(f"{time.strftime('%H:%M:%S')} {error}", "red")
                live.update(Group(told, Text(), seen), refresh=True)
            if stop.wait(every_s):
                return
