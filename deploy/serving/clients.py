"""URL and API keys of a `serve` on this machine, from the settings of its gateway."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from protocol.common.api_keys import KEY_BYTES, plain_keys
from protocol.common.secure_files import read_private
from protocol.settings.gateway import GatewaySettings

ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses to listen on, each with an address to connect to."""


def url(host: str, port: int) -> str:
    """Return the base URL of a server that listens at this address."""
    found = ANYWHERE.get(host, host)
    return f"http://{f'[{found}]' if ':' in found else found}:{port}"


def keys(gateway: GatewaySettings) -> list[str]:
    """Return the accepted API keys, except for those of which only a hash is stored. Raises `OSError`."""
    file = gateway.api_keys_file
    return [*gateway.api_keys, *(plain_keys(read_private(file)) if file else [])]


def new_keys(gateway: GatewaySettings) -> list[str]:
    """Return a random key by which `serve` can ask the gateway for its status, if all others are hashes."""
    needed = gateway.api_keys_file is not None and not keys(gateway)
    return [secrets.token_urlsafe(KEY_BYTES)] if needed else []


def existing_keys(environ: Mapping[str, str]) -> list[str]:
    """Return the API keys in the environment variable."""
    words = environ.get("ROUNDHOUSE_API_KEYS", "").split(",")
    return [word.strip() for word in words if word.strip()]
