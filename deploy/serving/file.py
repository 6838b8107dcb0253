"""The TOML configuration file of `serve` and its children, unvalidated."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def document(config: str | None) -> dict[str, Any]:
    """Return the whole document; empty if it cannot be read, which `settings.read` has reported before."""
    try:
        return tomllib.loads(Path(config).read_text()) if config else {}
    except (OSError, ValueError):
        return {}


def table(section: str, config: str | None) -> dict[str, Any]:
    """Return a section of the document; empty if it is missing or no table."""
    found = document(config).get(section)
    return found if isinstance(found, dict) else {}
