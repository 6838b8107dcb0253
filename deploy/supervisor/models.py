"""A model that a child serves, as far as a supervisor must know it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

Setting = str | int | float | bool


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model and what clients call it. `named`: by somebody, else by the model itself. `settings`: of its
    worker alone."""

    name: str
    model: str | None = None
    named: bool = False
    aliases: tuple[str, ...] = ()
    resident: bool = False
    settings: dict[str, Setting] = {}


def first_loaded(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Those that are started with: the resident ones, or else the first, so that one is soon there."""
    return [model for model in models if model.resident] or list(models[:1])
