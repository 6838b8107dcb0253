"""Fetches images and videos from https URLs, for allowed hosts only.

A name is resolved once. Only if all its addresses are public, one of them is connected to, so a later change
of the name has no effect (DNS rebinding). TLS and the Host header use the name. A redirect is checked like a
new URL. Of a host's response, errors repeat only the status code.

Each fetch has its own connection, without cookies, credentials or a proxy.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

import httpx

from broker.dialects.data_urls import MediaError, check_size
from broker.dialects.host_patterns import Address
from broker.dialects.media_hosts import AllowedHosts, MediaUrl, is_public, read_url

Expect = Callable[[int], None]
"""Callback with the size of each chunk that arrived; an exception ends the fetch."""

REDIRECTS_MAX = 3
FETCHES_MAX = 32
"""Maximum number of concurrent fetches of all requests."""
ADDRESSES_MAX = 4
"""Maximum number of addresses tried for one name."""
CONNECT_S_MAX, READ_S_MAX = 5.0, 10.0
"""Timeouts in seconds for connecting to an address and between two chunks of the response."""
UNREACHABLE = "its host cannot be reached"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = {
    "user-agent": "roundhouse",
    "accept": "image/*, video/*, */*;q=0.1",
    "accept-encoding": "identity",
    "connection": "close",
}


class Network(Protocol):
    """Name resolution and HTTP transport; replaced in tests."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Return the addresses of a host. Raises `OSError`."""

    def transport(self) -> httpx.AsyncBaseTransport:
        """Return a transport for one request to one address."""


class Internet:
    """The real network."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext = httpx.create_ssl_context(trust_env=False)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        return [ip_address(address[0]) for *_, address in found]

    def transport(self) -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class Fetcher:
    """Fetches media for all requests of a gateway."""

    def __init__(self, hosts: AllowedHosts, network: Network, *, bytes_max: int) -> None:
        """`bytes_max`: maximum size of one file."""
        self._hosts = hosts
        self._network = network
        self._bytes_max = bytes_max
        self._slots = asyncio.Semaphore(FETCHES_MAX)

    async def __call__(self, url: str, expect: Expect) -> bytes:
        """Fetch a URL. Raises `MediaError`, or what `expect` raises. The caller sets the overall timeout."""
        place = read_url(url)
        async with self._slots:
            for _ in range(1 + REDIRECTS_MAX):
                self._hosts.check(place)
                answer = await self._get(place, expect)
                if not isinstance(answer, _Redirect):
                    return answer
                place = place.redirected(answer.location)
        raise MediaError(f"its URL redirects more than {REDIRECTS_MAX} times")

    async def _get(self, place: MediaUrl, expect: Expect) -> bytes | _Redirect:
        """Fetch from the first address that accepts a connection."""
        for address in await self._addresses(place):
            try:
                return await self._ask(place, address, expect)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (httpx.TransportError, httpx.InvalidURL, ssl.SSLError) as error:
                raise MediaError("its download was incomplete") from error
        raise MediaError(UNREACHABLE)

    async def _addresses(self, place: MediaUrl) -> Sequence[Address]:
        """Resolve a host to public addresses.

        Raises the same `MediaError` for a name that does not resolve and for one with a private address.
        """
        if place.address is not None:
            found: Sequence[Address] = [place.address]
        else:
            try:
                found = await self._network.resolve(place.host, place.port)
            except (OSError, UnicodeError) as error:
                raise MediaError(UNREACHABLE) from error
        if not all(map(is_public, found)):
            raise MediaError(UNREACHABLE)
        return list(dict.fromkeys(found))[:ADDRESSES_MAX]

    async def _ask(self, place: MediaUrl, address: Address, expect: Expect) -> bytes | _Redirect:
        request = httpx.Request(
            "GET",
            httpx.URL(
                scheme=place.scheme, host=str(address), port=place.port, raw_path=place.target.encode()
            ),
            headers={"host": place.authority, **_HEADERS},
            extensions={
                "sni_hostname": place.host,
                "timeout": httpx.Timeout(READ_S_MAX, connect=CONNECT_S_MAX).as_dict(),
            },
        )
        async with self._network.transport() as transport:
            response = await transport.handle_async_request(request)
            try:
                return await self._read(response, expect)
            finally:
                await response.aclose()

    async def _read(self, response: httpx.Response, expect: Expect) -> bytes | _Redirect:
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return _Redirect(response.headers["location"])
        if response.status_code != 200:
            raise MediaError(f"its host answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise MediaError("its host sends it compressed")
        declared = response.headers.get("content-length", "")
        if declared.isdecimal():
            check_size(int(declared), self._bytes_max)
        return await self._gather(response.aiter_raw(), expect)

    async def _gather(self, pieces: AsyncIterator[bytes], expect: Expect) -> bytes:
        gathered = bytearray()
        async for piece in pieces:
            check_size(len(gathered) + len(piece), self._bytes_max)
            expect(len(piece))
            gathered += piece
        return bytes(gathered)
