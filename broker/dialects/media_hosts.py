"""Allow-list of hosts and addresses from which media are fetched. Pure; nothing is resolved here.

A URL is parsed once and only the result is used, so a second parser cannot disagree about its host. The
address of a host name is checked after resolution, not by the spelling of the name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from urllib.parse import quote, urljoin, urlsplit

from broker.dialects.data_urls import MediaError
from broker.dialects.host_patterns import Address, HostPatterns, canonical_host

URL_CHARACTERS_MAX = 8192
PORTS = {"http": 80, "https": 443}

_UNWANTED = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
"""Control characters, spaces, backslashes and lone surrogates, which UTF-8 cannot encode."""
_IN_PATH = "/%:@!$&'()*+,;=~-._?"
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """Parsed http(s) URL. `host`: an address, or a name in lower case without a trailing dot. `target`: path
    and query, in ASCII."""

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None = None

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def redirected(self, location: str) -> MediaUrl:
        """Return the target of a redirect. Raises MediaError."""
        if len(location) > URL_CHARACTERS_MAX:
            raise MediaError("the URL is too long")
        try:
            url = urljoin(self.url, location)
        except ValueError as error:
            raise _refusal() from error
        return read_url(url)


def read_url(url: str) -> MediaUrl:
    """Parse an http(s) URL. Raises MediaError, also for credentials in the URL and for an invalid host."""
    url = url.strip()
    if len(url) > URL_CHARACTERS_MAX:
        raise MediaError("the URL is too long")
    if _UNWANTED.search(url):
        raise _refusal()
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError as error:
        raise _refusal() from error
    if scheme not in PORTS:
        raise MediaError(f"{scheme[:32]}: URLs are not supported" if scheme else "not a URL")
    if "@" in parts.netloc or port == 0:
        raise _refusal()
    target = quote(parts.path or "/", safe=_IN_PATH)
    if parts.query:
        target += "?" + quote(parts.query, safe=_IN_PATH)
    try:
        name, address = canonical_host(host, is_literal=parts.netloc.startswith("["))
    except ValueError as error:
        raise _refusal() from error
    return MediaUrl(scheme, name, PORTS[scheme] if port is None else port, target, address)


def _refusal() -> MediaError:
    return MediaError("not a URL that can be fetched")


class AllowedHosts:
    """Configured allow-list of hosts, as `HostPatterns`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises ValueError for an invalid pattern."""
        self._patterns = HostPatterns(patterns)

    def check(self, place: MediaUrl) -> None:
        """Raise MediaError if the host is not allowed."""
        if not self._patterns.allows(place.host, place.address):
            raise MediaError(f"fetching from {place.host!r} is not allowed; send a data: URL")


def is_public(address: Address) -> bool:
    """Return whether the address is a single host on the public internet, in any spelling.

    Addresses that embed another one (IPv4-mapped, 6to4, Teredo) are not, except NAT64, by which some networks
    reach IPv4.
    """
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
