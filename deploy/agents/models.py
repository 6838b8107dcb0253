"""Models of a running endpoint, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec

from deploy.agents.profiles import Model
from protocol.common.error_text import closest_match


class LaunchError(Exception):
    """The endpoint, or a model of it, cannot be used; the message says what to do."""


class _Listed(msgspec.Struct):
    id: str
    context_length: int | None = None
    aliases: list[str] = []
    state: str = "loaded"
    tasks: tuple[str, ...] = ("generate",)


class _List(msgspec.Struct):
    data: list[_Listed]


def read(document: object) -> list[Model]:
    """Return the generative models in a response of `/v1/models`. Raises `LaunchError`."""
    try:
        listed = msgspec.convert(document, _List).data
    except msgspec.ValidationError as error:
        raise LaunchError(f"the endpoint did not return a list of models: {error}") from None
    return [
        Model(model.id, model.context_length or None, tuple(model.aliases), model.state == "loaded")
        for model in listed
        if "generate" in model.tasks
    ]


def choose(models: Sequence[Model], wanted: str | None) -> Model:
    """Return the model of this name or alias; by default the first loaded one, else the first.

    Raises `LaunchError`.
    """
    if not models:
        raise LaunchError("the endpoint serves no model yet: wait until one is loaded")
    if wanted is None:
        return next((model for model in models if model.loaded), models[0])
    for model in models:
        if wanted in (model.id, *model.aliases):
            return model
    names = [name for model in models for name in (model.id, *model.aliases)]
    hint = closest_match(wanted, names) or f"; available: {', '.join(names)}"
    raise LaunchError(f"the endpoint does not serve a model {wanted}{hint}")


def is_address(url: str) -> bool:
    """Return whether `url` is an HTTP URL with a host."""
    try:
        found = urlsplit(url)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        return False


def is_near(url: str) -> bool:
    """Return whether `url` is on this machine, so that no proxy must be used."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
