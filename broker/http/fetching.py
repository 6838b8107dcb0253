"""Images and videos from elsewhere: an https URL -> bytes, of hosts that are allowed and nobody else.

A name is resolved once. If all its addresses are public, one of these and no other is connected to: whatever
the name means a moment later plays no part. TLS and the Host header are about the name. A redirect is a new
URL, checked as the first one was. What a host says is never said again, but for its status: whoever may be
asked at all is public.

Each fetch has its own connection: nothing is kept from one to the next, no cookie and no credential, and no
proxy is asked.
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

from broker.dialects.hosts import Address, Hosts, Place, is_public, read_url
from broker.dialects.media import MediaError, check_size

Expect = Callable[[int], None]
"""Called with the size of each piece that has arrived; what it raises ends the fetch."""

REDIRECTS_MAX = 3
FETCHES_MAX = 32
"""At once, of all requests together."""
ADDRESSES_MAX = 4
"""Of one name: so many are tried."""
CONNECT_S_MAX, READ_S_MAX = 5.0, 10.0
"""To connect to an address, and between two pieces of what it says."""
UNREACHABLE = "its host cannot be reached"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = {
    "user-agent": "roundhouse",
    "accept": "image/*, video/*, */*;q=0.1",
    "accept-encoding": "identity",
    "connection": "close",
}


class Network(Protocol):
    """Where names and addresses lead."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Raises OSError."""

    def transport(self) -> httpx.AsyncBaseTransport:
        """For one request, to an address."""


class Internet:
    """The real one."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext = httpx.create_ssl_context(trust_env=False)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        return [ip_address(told[0]) for *_, told in found]

    def transport(self) -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class Fetcher:
    """Fetches for all requests of a gateway."""

    def __init__(self, hosts: Hosts, network: Network, *, bytes_max: int) -> None:
        """`bytes_max`: of one image, or of one file."""
        self._hosts = hosts
        self._network = network
        self._bytes_max = bytes_max
        self._slots = asyncio.Semaphore(FETCHES_MAX)

    async def __call__(self, url: str, expect: Expect) -> bytes:
        """Raises `MediaError`, or what `expect` does. How long all of it may take is the caller's to say."""
        place = read_url(url)
        async with self._slots:
            for _ in range(1 + REDIRECTS_MAX):
                self._hosts.check(place)
                answer = await self._get(place, expect)
                if not isinstance(answer, _Redirect):
                    return answer
                place = place.redirected(answer.location)
        raise MediaError(f"it is redirected more than {REDIRECTS_MAX} times")

    async def _get(self, place: Place, expect: Expect) -> bytes | _Redirect:
        """From the first of its addresses that takes a connection."""
        for address in await self._addresses(place):
            try:
                return await self._ask(place, address, expect)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (httpx.TransportError, httpx.InvalidURL, ssl.SSLError) as error:
                raise MediaError("it did not arrive whole") from error
        raise MediaError(UNREACHABLE)

    async def _addresses(self, place: Place) -> Sequence[Address]:
        """All public, or MediaError: the same for a name that leads nowhere and for one that leads inside."""
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

    async def _ask(self, place: Place, address: Address, expect: Expect) -> bytes | _Redirect:
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
