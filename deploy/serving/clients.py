"""URL and API keys of a `serve` on this machine with the same flags, variables and file as this command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.serving import serve
from deploy.serving.commandlines import API_KEYS
from deploy.serving.settings import GATEWAY, table
from protocol import settings
from protocol.secure_files import read_private

ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses to listen on, each with an address to connect to."""


def url(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the base URL. Raises `SettingsError`."""
    named = host(argv, environ)
    found = ANYWHERE.get(named, named)
    return f"http://{f'[{found}]' if ':' in found else found}:{serve.port(argv, environ)}"


def host(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the address that the gateway listens on. Raises `SettingsError`."""
    return str(serve.own_settings(argv, environ).host or _of_gateway("host", argv, environ) or GATEWAY.host)


def keys(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the accepted API keys; empty if none are required. Raises `SettingsError`, or `OSError`."""
    given = serve.own_settings(argv, environ)
    said = given.api_keys or tuple(_words(_of_gateway("api_keys", argv, environ)))
    named = given.api_keys_file or _of_gateway("api_keys_file", argv, environ)
    return [*said, *(_filed(Path(str(named)).expanduser()) if named else [])]


def existing_keys(environ: Mapping[str, str]) -> list[str]:
    """Return the API keys in the environment variable."""
    return _words(environ.get(API_KEYS))


def _filed(path: Path) -> list[str]:
    """Return the first word of each line that is not a comment."""
    lines = (line.split() for line in read_private(path).decode("utf-8-sig", "replace").splitlines())
    return [words[0] for words in lines if words and not words[0].startswith("#")]


def _words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [word.strip() for word in str(value or "").split(",") if word.strip()]


def _of_gateway(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> object:
    """Return a setting in the file's `[gateway]` section."""
    return table("gateway", settings.config_file(argv, environ)).get(name)
