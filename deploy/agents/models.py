"""Models of a running endpoint, and the choice among them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec

from deploy.agents.profiles import NO_KEY, Endpoint, Model
from protocol.common.environment import network_fault
from protocol.common.error_text import closest_match
from protocol.server_lock import running_servers

ANSWER_WAIT_S = 10.0
ANSWER_BYTES_MAX = 2**24


class LaunchError(Exception):
    """The agent cannot be started; the message says what to do."""


class _Listed(msgspec.Struct):
    id: str
    context_length: int | None = None
    aliases: list[str] = []
    state: str = "loaded"
    tasks: tuple[str, ...] = ("generate",)


class _List(msgspec.Struct):
    data: list[_Listed]


def ask(endpoint: Endpoint) -> list[Model]:
    """Return the models of a running endpoint. Raises `LaunchError`."""
    if not is_address(endpoint.url):
        raise LaunchError(f"{endpoint.url!r} is not a valid URL: write it as http://host:port")
    _get(endpoint, "/health")
    return read(_get(endpoint, "/v1/models"))


def read(body: bytes) -> list[Model]:
    """Return the generative models in a response of `/v1/models`. Raises `LaunchError`."""
    try:
        listed = msgspec.json.decode(body, type=_List).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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


def _get(endpoint: Endpoint, path: str) -> bytes:
    request = urllib.request.Request(endpoint.url + path)
    if endpoint.key != NO_KEY:
        request.add_header("Authorization", f"Bearer {endpoint.key}")
    proxies: dict[str, str] | None = {} if is_near(endpoint.url) else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    try:
        with opener.open(request, timeout=ANSWER_WAIT_S) as answer:
            found: bytes = answer.read(ANSWER_BYTES_MAX)
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise LaunchError(_refused(endpoint, path, error.code, error.read(ANSWER_BYTES_MAX))) from None
    except (OSError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        if proxies is None and (fault := network_fault(os.environ)):
            raise LaunchError(f"cannot connect to {endpoint.url}: {fault}") from None
        raise LaunchError(
            f"cannot connect to {endpoint.url} ({why}): start a server with `roundhouse serve`, or select one"
            f" with --host and --port, or --url{running_servers()}"
        ) from None


def _refused(endpoint: Endpoint, path: str, status: int, body: bytes) -> str:
    if status == 401:
        return f"{endpoint.url} requires an API key: set ROUNDHOUSE_API_KEYS, or pass serve's --config"
    return f"{endpoint.url}{path} returned {status}: {_message(body)}"


def _message(body: bytes) -> str:
    try:
        document: Any = json.loads(body)
        return str(document["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "this is not a Roundhouse endpoint"
