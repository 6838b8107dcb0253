"""The TOML file that `serve` and its children read, as it stands."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def document(config: str | None) -> dict[str, Any]:
    """All of it. Nothing where it cannot be read: `settings.read`, which comes first, has said so."""
    try:
        return tomllib.loads(Path(config).read_text()) if config else {}
    except (OSError, ValueError):
        return {}


def table(section: str, config: str | None) -> dict[str, Any]:
    """A section of it; nothing where there is none, or no table."""
    found = document(config).get(section)
    return found if isinstance(found, dict) else {}
