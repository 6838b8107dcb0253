"""`python -m tests.gateway`: the gateway, with internet hosts replaced by servers on this machine. In JSON,
`TESTS_NETWORK` maps `names` to lists of addresses, and `addresses` to loopback ports."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import httpx

from broker.__main__ import main
from broker.dialects.host_patterns import Address
from tests.system import NO_TLS


@dataclass(frozen=True, slots=True)
class Map:
    """An implementation of `broker.requests.fetching.Network` with fixed names and addresses."""

    names: Mapping[str, Sequence[str]]
    addresses: Mapping[str, int]

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        if host not in self.names:
            raise socket.gaierror(f"unknown host {host}")
        return [ip_address(address) for address in self.names[host]]

    def transport(self) -> httpx.AsyncBaseTransport:
        return Rerouted(self.addresses)


class Rerouted(httpx.AsyncHTTPTransport):
    """A transport that connects to loopback ports instead of addresses; the headers stay unchanged."""

    def __init__(self, addresses: Mapping[str, int]) -> None:
        super().__init__(verify=NO_TLS, trust_env=False)
        self._addresses = addresses

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        port = self._addresses.get(request.url.host)
        if port is None:
            raise httpx.ConnectError(f"no server at {request.url.host}")
        request.url = request.url.copy_with(host="127.0.0.1", port=port)
        return await super().handle_async_request(request)


if __name__ == "__main__":
    raise SystemExit(main(Map(**json.loads(os.environ["TESTS_NETWORK"]))))
