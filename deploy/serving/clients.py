"""Where the clients on this machine find a `serve` that is told the same as we are, and by which keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.serving import serve
from deploy.serving.commandlines import API_KEYS
from deploy.serving.file import table
from protocol import settings
from protocol.private import read_private

HOST = "127.0.0.1"
ANYWHERE = {"": HOST, "0.0.0.0": HOST, "::": "::1"}
"""Addresses to listen on that are none to connect to."""


def url(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Raises `SettingsError`."""
    named = host(argv, environ)
    found = ANYWHERE.get(named, named)
    return f"http://{f'[{found}]' if ':' in found else found}:{serve.port(argv, environ)}"


def host(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The address that it listens on. Raises `SettingsError`."""
    return str(serve.own_settings(argv, environ).host or _of_gateway("host", argv, environ) or HOST)


def keys(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The API keys that it takes; none: it needs none. Raises `SettingsError`, or `OSError`."""
    given = serve.own_settings(argv, environ)
    said = given.api_keys or tuple(_words(_of_gateway("api_keys", argv, environ)))
    named = given.api_keys_file or _of_gateway("api_keys_file", argv, environ)
    return [*said, *(_filed(Path(str(named)).expanduser()) if named else [])]


def keys_at_hand(environ: Mapping[str, str]) -> list[str]:
    """Those of the variable alone."""
    return _words(environ.get(API_KEYS))


def _filed(path: Path) -> list[str]:
    """The first word of each line, but of those that are comments."""
    lines = (line.split() for line in read_private(path).decode("utf-8-sig", "replace").splitlines())
    return [words[0] for words in lines if words and not words[0].startswith("#")]


def _words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [word.strip() for word in str(value or "").split(",") if word.strip()]


def _of_gateway(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> object:
    """What the file says to the gateway itself."""
    return table("gateway", settings.config_file(argv, environ)).get(name)
