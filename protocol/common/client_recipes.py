"""The recipes that connect clients to a server, for the gateway's page and for `roundhouse launch`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def client_recipes() -> dict[str, Any]:
    """Return `client_recipes.toml`, whose comments explain its entries."""
    text = resources.files(__package__).joinpath("client_recipes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
