"""URL and API keys of a `serve` on this machine with the same flags, variables and file as this command."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.serving import serve
from deploy.serving.commandlines import API_KEYS
from deploy.serving.settings import table
from deploy.supervisor.child import Child
from protocol.common.api_keys import KEY_BYTES, plain_keys
from protocol.common.model_folder import expand_user
from protocol.common.secure_files import read_private
from protocol.settings import reader as settings

ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses to listen on, each with an address to connect to."""


def url(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the base URL. Raises `SettingsError`."""
    named, port = serve.address(argv, environ)
    found = ANYWHERE.get(named, named)
    return f"http://{f'[{found}]' if ':' in found else found}:{port}"


def keys(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the accepted API keys, except for those of which only a hash is stored.

    Raises `SettingsError` or `OSError`.
    """
    given = serve.own_settings(argv, environ).api_keys or _words(_of_gateway("api_keys", argv, environ))
    file = keys_file(argv, environ)
    return [*given, *(plain_keys(read_private(file)) if file else [])]


def keys_file(argv: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Return the file of API keys in the settings of `serve`. Raises `SettingsError`."""
    named = serve.own_settings(argv, environ).api_keys_file or _of_gateway("api_keys_file", argv, environ)
    return expand_user(Path(str(named))) if named else None


def gateway_with_key(
    gateway: Child, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Child, list[str]]:
    """Return the gateway, and API keys by which `serve` can ask it for its status.

    Where the file holds only hashes, the gateway gets a random key for this run in its environment.
    """
    found = keys(argv, environ)
    if not found and keys_file(argv, environ) is not None:
        found = [secrets.token_urlsafe(KEY_BYTES)]
        gateway = replace(gateway, env={**gateway.env, API_KEYS: found[0]})
    return gateway, found


def existing_keys(environ: Mapping[str, str]) -> list[str]:
    """Return the API keys in the environment variable."""
    return _words(environ.get(API_KEYS))


def _words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [word.strip() for word in str(value or "").split(",") if word.strip()]


def _of_gateway(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> object:
    """Return a setting in the file's `[gateway]` section."""
    return table("gateway", settings.config_file(argv, environ)).get(name)
