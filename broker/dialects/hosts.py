"""Whom this server asks for images: which hosts, and at which addresses. Pure; nothing is resolved here.

A URL is read once, and what is read is all that is used of it afterwards: nobody else's reading of it can
lead elsewhere. What a name leads to is checked when it has been resolved, not by how it looks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from urllib.parse import quote, urljoin, urlsplit

from broker.dialects.media import MediaError

Address = IPv4Address | IPv6Address

URL_CHARACTERS_MAX = 8192
PORTS = {"http": 80, "https": 443}

_UNWANTED = re.compile(r"[\x00-\x20\x7f\\]")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PATTERN = re.compile(rf"\*|(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}")
_IN_PATH = "/%:@!$&'()*+,;=~-._?"
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an http(s) URL leads. `host`: a name in lower case without a dot at its end, or an address.
    `target`: path and query, in ASCII."""

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None = None

    @property
    def authority(self) -> str:
        """What a Host header says."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def redirected(self, location: str) -> Place:
        """Where a redirect leads from here. Raises MediaError."""
        if len(location) > URL_CHARACTERS_MAX:
            raise MediaError("its URL is too long")
        try:
            url = urljoin(self.url, location)
        except ValueError as error:
            raise _refusal() from error
        return read_url(url)


def read_url(url: str) -> Place:
    """Where to ask. Raises MediaError for what is no http(s) URL, has a name or a password in it, or a host
    that is spelt as no host is."""
    url = url.strip()
    if len(url) > URL_CHARACTERS_MAX:
        raise MediaError("its URL is too long")
    if _UNWANTED.search(url):
        raise _refusal()
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError as error:
        raise _refusal() from error
    if scheme not in PORTS:
        raise MediaError(f"{scheme[:32]}: URLs are refused" if scheme else "not a URL")
    if "@" in parts.netloc or port == 0:
        raise _refusal()
    target = quote(parts.path or "/", safe=_IN_PATH, errors="replace")
    if parts.query:
        target += "?" + quote(parts.query, safe=_IN_PATH, errors="replace")
    name, address = _host(host, is_literal=parts.netloc.startswith("["))
    return Place(scheme, name, PORTS[scheme] if port is None else port, target, address)


def _host(host: str, *, is_literal: bool) -> tuple[str, Address | None]:
    """Its canonical spelling, and the address that it is itself."""
    if is_literal:
        try:
            six = IPv6Address(host)
        except ValueError as error:
            raise _refusal() from error
        if six.scope_id is not None:
            raise _refusal()
        return str(six), six
    name = _ascii(host).lower().removesuffix(".")
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise _refusal()
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name, None
    # Whatever ends in a number is an address, and may be spelt in the one way that everybody reads alike.
    try:
        return name, IPv4Address(name)
    except ValueError as error:
        raise _refusal() from error


def _ascii(host: str) -> str:
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError as error:
        raise _refusal() from error


def _refusal() -> MediaError:
    return MediaError("not a URL that can be fetched")


class Hosts:
    """Those that may be asked, as they are configured: `host`, `*.domain` for all below it, or `*`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises ValueError for what is none of these."""
        self._names = frozenset(map(_pattern, patterns))
        self._any = "*" in self._names
        self._domains = tuple(name[1:] for name in self._names if name.startswith("*."))

    def check(self, place: Place) -> None:
        """Raises MediaError."""
        if not self._allows(place):
            raise MediaError(f"fetching from {place.host!r} is not allowed here; send a data: URL")

    def _allows(self, place: Place) -> bool:
        if self._any or place.host in self._names:
            return True
        return place.address is None and place.host.endswith(self._domains)


def _pattern(text: str) -> str:
    """In the spelling of `Place.host`."""
    if text.startswith("[") or text.count(":") > 1:
        return str(IPv6Address(text.strip("[]")))
    spelt = text.lower()
    spelt = spelt if spelt == "*." else spelt.removesuffix(".")
    if not _PATTERN.fullmatch(spelt):
        raise ValueError(f"expected a host, *.domain or *, not {text[:64]!r}")
    return spelt


def is_public(address: Address) -> bool:
    """Whether it is a single host of the public internet, however it is spelt. What stands for an address of
    another kind (IPv4-mapped, 6to4, Teredo) is none, but for NAT64, by which some networks reach IPv4."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _UNICAST or address.sixtofour is not None or address.teredo is not None:
            return False
    return address.is_global and not (
        address.is_private
        or address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )
