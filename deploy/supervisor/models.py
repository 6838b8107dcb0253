"""A model that a child serves, as far as a supervisor must know it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

REPLICAS_MAX = 64
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
Setting = str | int | float | bool


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model and what clients call it. `named`: by somebody, else by the model itself. `replicas`: so many
    workers serve it. `settings`: of these alone."""

    name: str
    model: str | None = None
    named: bool = False
    aliases: tuple[str, ...] = ()
    resident: bool = False
    replicas: Replicas = 1
    settings: dict[str, Setting] = {}


def first_loaded(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Those that are started with: the resident ones, or else the first, so that one is soon there."""
    return [model for model in models if model.resident] or list(models[:1])
