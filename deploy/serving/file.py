"""The TOML file that `serve` and its children read: which one, and its tables as they stand, unchecked."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path


def config_file(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The TOML file that `settings.read` takes, to be handed on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found: str | None = parser.parse_known_args(list(argv))[0].config
    return found or environ.get("ROUNDHOUSE_CONFIG") or None


def table(section: str, config: str | None) -> dict[str, object]:
    """A section of it; none where there is none, or no table."""
    found = tomllib.loads(Path(config).read_text()).get(section) if config else None
    return found if isinstance(found, dict) else {}
