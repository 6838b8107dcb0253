"""Fetching of remote images: allowed hosts, resolved addresses, redirects and limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

import httpx
import pytest

from broker.dialects.data_urls import MediaError
from broker.dialects.host_patterns import Address
from broker.dialects.media_hosts import AllowedHosts
from broker.requests.fetching import ADDRESSES_MAX, FETCHES_MAX, REDIRECTS_MAX, UNREACHABLE, Fetcher, Internet
from tests.broker.asgi import run
from tests.hosts import serving_images

BYTES_MAX = 1000
ONE, TWO, SIX = "93.184.216.34", "93.184.216.35", "2606:4700:4700::1111"


class Pieces(httpx.AsyncByteStream):
    """Body that records how many of its chunks were read, and whether it was closed."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.read = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            self.read += 1
            yield piece

    async def aclose(self) -> None:
        self.closed = True


Answer = Callable[[httpx.Request], httpx.Response]


def page(*pieces: bytes, status: int = 200, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, stream=Pieces(*pieces))


@dataclass
class Net:
    """Network in which every address gives the same answer.

    `changing` has the addresses of a name from its second resolution on.
    """

    answer: Answer
    names: dict[str, list[str]] = field(default_factory=lambda: {"one.test": [ONE], "two.test": [TWO]})
    changing: dict[str, list[str]] = field(default_factory=dict)
    asked: list[httpx.Request] = field(default_factory=list)
    resolved: list[tuple[str, int]] = field(default_factory=list)
    open: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        names = self.changing if (host, port) in self.resolved and host in self.changing else self.names
        self.resolved.append((host, port))
        if host not in names:
            raise socket.gaierror("no such name")
        return [ip_address(text) for text in names[host]]

    def transport(self) -> httpx.AsyncBaseTransport:
        return Transport(self)


class Transport(httpx.AsyncBaseTransport):
    def __init__(self, net: Net) -> None:
        self._net = net
        net.open += 1

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._net.asked.append(request)
        await asyncio.sleep(0)
        return self._net.answer(request)

    async def aclose(self) -> None:
        self._net.open -= 1


def fetch(
    net: Net, url: str, hosts: Sequence[str] = ("*",), expect: Callable[[int], None] | None = None
) -> bytes:
    """Fetch the URL, and assert that no connection stays open."""
    got: list[bytes] = []

    async def talk() -> None:
        fetcher = Fetcher(AllowedHosts(hosts), net, bytes_max=BYTES_MAX)
        got.append(await fetcher(url, expect or (lambda count: None)))

    try:
        run(talk())
    finally:
        assert net.open == 0
    return got[0]


def refusal(net: Net, url: str, hosts: Sequence[str] = ("*",)) -> str:
    with pytest.raises(MediaError) as caught:
        fetch(net, url, hosts)
    return str(caught.value)


def targets(net: Net) -> list[tuple[str, str]]:
    """Return the address and the Host header of each request."""
    return [(request.url.host, request.headers["host"]) for request in net.asked]


# --- allowed targets ---------------------------------------------------------------------------------


def test_the_address_that_was_checked_is_connected_to_and_told_nothing_else() -> None:
    net = Net(lambda request: page(b"ab", b"cd", set_cookie="a=b"), changing={"one.test": ["127.0.0.1"]})
    assert fetch(net, "https://One.test.:8443/a%20b?c=d") == b"abcd"
    [request] = net.asked
    assert str(request.url) == f"https://{ONE}:8443/a%20b?c=d"
    assert request.headers["host"] == "one.test:8443"
    assert request.extensions["sni_hostname"] == "one.test"
    assert net.resolved == [("one.test", 8443)]
    assert set(request.headers) == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert request.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["169.254.169.254"], ["fd00::1"], ["::ffff:10.0.0.1"], [ONE, "127.0.0.1"], []]
)
def test_a_name_that_leads_inside_is_as_one_that_leads_nowhere(found: list[str]) -> None:
    net = Net(lambda request: page(b"secret"), names={"inside.test": found})
    assert refusal(net, "http://inside.test/") == refusal(net, "http://nowhere.test/") == UNREACHABLE
    assert net.asked == []


def test_an_address_inside_or_a_host_that_is_not_allowed_is_neither_asked_nor_resolved() -> None:
    net = Net(lambda request: page(b"secret"))
    for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[fe80::1]"):
        assert refusal(net, f"http://{host}/") == UNREACHABLE
    assert "not allowed" in refusal(net, "http://two.test/", ["one.test"])
    assert net.asked == net.resolved == []


def test_the_next_address_is_tried_where_one_takes_no_connection() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == ONE:
            return page(b"x")
        raise httpx.ConnectError("no route")

    net = Net(answer, names={"one.test": [SIX, SIX, ONE]})
    assert fetch(net, "http://one.test/") == b"x"
    assert [address for address, _ in targets(net)] == [SIX, ONE]
    many = Net(answer, names={"one.test": [f"2606:4700::{n}" for n in range(1, 10)]})
    assert refusal(many, "http://one.test/") == UNREACHABLE
    assert len(many.asked) == ADDRESSES_MAX


# --- redirects ---------------------------------------------------------------------------------------


def leading(chain: dict[str, str]) -> Answer:
    """Return an answer that redirects by host and path, and otherwise serves the image."""

    def answer(request: httpx.Request) -> httpx.Response:
        location = chain.get(request.headers["host"] + request.url.path)
        return page(b"image") if location is None else page(b"no", status=302, location=location)

    return answer


def test_redirects_are_followed_by_hand_and_resolved_anew() -> None:
    net = Net(leading({"one.test/a": "b", "one.test/b": "//two.test:81/c", "two.test:81/c": "/d"}))
    assert fetch(net, "http://one.test/a") == b"image"
    assert targets(net) == [(ONE, "one.test"), (ONE, "one.test"), (TWO, "two.test:81"), (TWO, "two.test:81")]


def test_more_redirects_than_there_may_be_are_refused() -> None:
    chain = {f"one.test/{n}": f"/{n + 1}" for n in range(REDIRECTS_MAX + 1)}
    net = Net(leading(chain))
    assert "redirects more than" in refusal(net, "http://one.test/0")
    assert len(net.asked) == REDIRECTS_MAX + 1
    assert fetch(Net(leading(chain)), "http://one.test/1") == b"image"


@pytest.mark.parametrize(
    ("location", "hosts", "why"),
    [
        ("http://inside.test/", ["*"], UNREACHABLE),
        ("http://two.test/", ["one.test"], "not allowed"),
        ("file:///etc/passwd", ["*"], "file: URLs are not supported"),
        ("", ["*"], "redirects more than"),
    ],
)
def test_each_hop_is_checked_as_the_first_one(location: str, hosts: list[str], why: str) -> None:
    names = {"one.test": [ONE], "inside.test": ["10.0.0.1"], "two.test": [TWO]}
    net = Net(leading({"one.test/": location}), names=names)
    assert why in refusal(net, "http://one.test/", hosts)
    assert {address for address, _ in targets(net)} == {ONE}


# --- responses ---------------------------------------------------------------------------------------


def _breaks(request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("a secret of this host")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda request: page(b"secret", status=206), "its host answered with status 206"),
        (lambda request: page(b"secret", status=302), "its host answered with status 302"),
        (lambda request: page(b"x", content_encoding="gzip"), "its host sends it compressed"),
        (_breaks, "its download was incomplete"),
    ],
)
def test_only_a_whole_200_is_an_image_and_nothing_else_of_it_is_told(answer: Answer, why: str) -> None:
    assert refusal(Net(answer), "http://one.test/") == why


def test_oversized_file_is_not_read_to_its_end() -> None:
    told, body = Pieces(b"x"), Pieces(*[b"x" * 400] * 100)
    net = Net(lambda request: httpx.Response(200, headers={"content-length": "1001"}, stream=told))
    assert refusal(net, "http://one.test/") == "the file is too large: 1001 bytes, at most 1000 are allowed"
    assert (told.read, told.closed) == (0, True)
    assert "too large" in refusal(Net(lambda request: httpx.Response(200, stream=body)), "http://one.test/")
    assert (body.read, body.closed) == (3, True)
    assert len(fetch(Net(lambda request: page(b"x" * 400, b"x" * 600)), "http://one.test/")) == BYTES_MAX


def test_every_piece_is_expected_and_who_does_not_want_it_ends_the_fetch() -> None:
    expected: list[int] = []
    assert fetch(Net(lambda request: page(b"ab", b"c")), "http://one.test/", expect=expected.append) == b"abc"
    assert expected == [2, 1]

    def refuse(count: int) -> None:
        raise RuntimeError("no room")

    body = Pieces(b"a", b"b")
    with pytest.raises(RuntimeError, match="no room"):
        fetch(Net(lambda request: httpx.Response(200, stream=body)), "http://one.test/", expect=refuse)
    assert (body.read, body.closed) == (1, True)


async def test_concurrent_fetches_are_limited() -> None:
    most = 0
    net = Net(lambda request: page(b"x"))
    fetcher = Fetcher(AllowedHosts(["*"]), net, bytes_max=BYTES_MAX)

    def poll(count: int) -> None:
        nonlocal most
        most = max(most, net.open)

    got = await asyncio.gather(*(fetcher(f"http://one.test/{n}", poll) for n in range(3 * FETCHES_MAX)))
    assert got == [b"x"] * (3 * FETCHES_MAX)
    assert net.open == 0
    assert 1 < most <= FETCHES_MAX


# --- the real network --------------------------------------------------------------------------------


def test_the_real_network_resolves_names_and_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    internet = Internet()

    async def talk(port: int) -> None:
        assert "127.0.0.1" in {str(address) for address in await internet.resolve("localhost", port)}
        async with internet.transport() as transport:
            request = httpx.Request("GET", f"http://127.0.0.1:{port}/a")
            response = await transport.handle_async_request(request)
            assert await response.aread() == b"image"

    with serving_images({"/a": b"image"}) as server:
        run(talk(server.port))


async def test_loopback_is_refused_whatever_is_allowed() -> None:
    fetcher = Fetcher(AllowedHosts(["*", "127.0.0.1", "localhost"]), Internet(), bytes_max=BYTES_MAX)
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        with pytest.raises(MediaError, match=UNREACHABLE):
            await fetcher(f"http://{host}:9/", lambda count: None)
