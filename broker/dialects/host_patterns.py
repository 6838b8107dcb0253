"""Host names and addresses: their canonical spelling, and patterns for them. Pure; nothing is resolved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PATTERN = re.compile(rf"\*|(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}")


def canonical_host(host: str, *, is_literal: bool = False) -> tuple[str, Address | None]:
    """Return the canonical spelling of a URL's host, and the address if the host is one.

    Names are in lower case without a trailing dot. `is_literal`: the host was in brackets, which `host` is
    without. Raises ValueError.
    """
    if is_literal:
        six = IPv6Address(host)
        if six.scope_id is not None:
            raise ValueError("an address with a zone")
        return str(six), six
    name = _ascii(host).lower().removesuffix(".")
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise ValueError("not a host name")
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name, None
    # A host whose last label is a number is an address; only the unambiguous dotted form is accepted.
    return name, IPv4Address(name)


def _ascii(host: str) -> str:
    return host if host.isascii() else host.encode("idna").decode()  # a UnicodeError is a ValueError


class HostPatterns:
    """Configured allow-list: `host`, `*.domain` for all subdomains, or `*`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError for any other pattern."""
        self._names = frozenset(map(_pattern, patterns))
        self._any = "*" in self._names
        self._domains = tuple(name[1:] for name in self._names if name.startswith("*."))

    def allows(self, host: str, address: Address | None) -> bool:
        """Return whether a pattern matches. The arguments are as from `canonical_host`."""
        if self._any or host in self._names:
            return True
        return address is None and host.endswith(self._domains)


def _pattern(text: str) -> str:
    """Normalize a pattern to the spelling of `canonical_host`."""
    if text.startswith("[") or text.count(":") > 1:
        return str(IPv6Address(text.strip("[]")))
    spelt = text.lower()
    spelt = spelt if spelt == "*." else spelt.removesuffix(".")
    if not _PATTERN.fullmatch(spelt):
        raise ValueError(f"expected a host, *.domain or *, not {text[:64]!r}")
    return spelt
