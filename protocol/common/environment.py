"""Environment variables that would break a process somewhere inside: each fault names its variable and what
to do."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from protocol.common.cache_folder import cache_folder

_FOLDERS = {
    *("HOME", "TMPDIR", "HF_HOME", "HF_HUB_CACHE"),
    *("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"),
}
_PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "https_proxy", "http_proxy")
_SCHEMES = ("http", "https", "socks5", "socks5h")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class EnvironmentFault(ValueError):
    """A variable that cannot be used; the message names it."""


def faults(environ: Mapping[str, str], platform: str = sys.platform) -> list[str]:
    """Return one line for each variable with which nothing can be started."""
    names = sorted(name for name in environ if name in _FOLDERS or name.startswith("ROUNDHOUSE_"))
    found = [f"{name}: {why}" for name in names if (why := why_no_text(environ[name]))]
    try:
        cache_folder(environ, platform)
    except RuntimeError:
        found.append("HOME is not set, and this user has no home: set it to a folder that you can write to")
    return found


def why_no_text(value: str) -> str:
    """Return why a variable, a path or an argument cannot be used as text; "" if it can."""
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8 are surrogates
        return f"{value!a} is not UTF-8: use another name"
    return ""


@contextmanager
def network_variables(environ: Mapping[str, str], invalid_url: type[Exception]) -> Iterator[None]:
    """Raise `EnvironmentFault` if a client of the network cannot be made because of a variable.

    `invalid_url`: the exception of its HTTP library, beside those of Python, for an invalid URL.
    """
    try:
        yield
    except (ImportError, ValueError, OSError, invalid_url) as error:
        if why := network_fault(environ):
            raise EnvironmentFault(why) from error
        raise


def network_fault(environ: Mapping[str, str]) -> str:
    """Return which variable of proxies or certificates is at fault, and what to do; "" if none is."""
    for name in _PROXIES:
        if why := _why_no_proxy(environ.get(name, "")):
            return f"{name} {why}, or unset it"
    for name in _CERTIFICATES:
        if (value := environ.get(name)) and (why := _why_no_certificates(name, Path(value))):
            return f"{name}: {value} {why}: name another one, or unset it"
    return ""


def _why_no_proxy(value: str) -> str:
    scheme = value.partition("://")[0].lower() if "://" in value else "http"
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        is_valid = not value or (bool(parts.hostname) and parts.port != 0)
    except ValueError:
        is_valid = False
    if not is_valid:  # it may contain a password
        return "is not a valid URL: write it as http://HOST:PORT"
    if scheme not in _SCHEMES:
        return f"names a proxy of the kind {scheme}://, which is not supported: use http:// or socks5://"
    if scheme.startswith("socks") and find_spec("socksio") is None:
        return f"names a proxy of the kind {scheme}://: pip install socksio, use one of the kind http://"
    return ""


def _why_no_certificates(name: str, path: Path) -> str:
    if name == "SSL_CERT_DIR":
        return "" if path.is_dir() else "is no folder"
    try:
        ssl.create_default_context(cafile=str(path))
    except (OSError, ValueError) as error:
        return f"cannot be read as certificates ({getattr(error, 'strerror', None) or error})"
    return ""
