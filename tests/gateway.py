"""`python -m tests.gateway`: the gateway, to which hosts of the internet are servers of this machine.

Names and addresses lead where `TESTS_NETWORK` says: JSON, `names` to lists of addresses and `addresses` to
ports on loopback. Whom the gateway may ask it decides as ever: no setting of its own opens loopback.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import httpx

from broker.__main__ import main
from broker.dialects.hosts import Address
from tests.system import NO_TLS


@dataclass(frozen=True, slots=True)
class Map:
    """`broker.http.fetching.Network` of a few names and addresses."""

    names: Mapping[str, Sequence[str]]
    addresses: Mapping[str, int]

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        if host not in self.names:
            raise socket.gaierror(f"there is no {host}")
        return [ip_address(address) for address in self.names[host]]

    def transport(self) -> httpx.AsyncBaseTransport:
        return Rerouted(self.addresses)


class Rerouted(httpx.AsyncHTTPTransport):
    """Connects to ports of this machine in place of addresses; who is asked for is left in the headers."""

    def __init__(self, addresses: Mapping[str, int]) -> None:
        super().__init__(verify=NO_TLS, trust_env=False)
        self._addresses = addresses

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        port = self._addresses.get(request.url.host)
        if port is None:
            raise httpx.ConnectError(f"nobody is at {request.url.host}")
        request.url = request.url.copy_with(host="127.0.0.1", port=port)
        return await super().handle_async_request(request)


if __name__ == "__main__":
    raise SystemExit(main(Map(**json.loads(os.environ["TESTS_NETWORK"]))))
