"""Web pages of other origins: Host, Origin and content type, as decided and over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.app import ROUTES
from broker.dialects.host_patterns import HostPatterns
from broker.middleware.origins import (
    ADMINISTRATIVE_PATHS,
    CONTAINER_HOSTS,
    OriginPolicy,
    is_administrative,
    names_of,
    read_authority,
)
from protocol.errors import Code, RequestError
from tests.system import System, chat_body, running_system

HERE = "127.0.0.1:8000"
PAGE = "https://page.example"
REMEDY = "--cors-origins"
JSON = "application/json"

PUBLIC_PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/rerank", "/rerank", "/v2/rerank", "/v1/models", "/v1/models/{model:path}", "/tokenize",
    "/detokenize", "/openapi.json", "/health", "/ready",
    # A response is found by its id, which cannot be guessed, and which status alone would reveal.
    "/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/{id}/cancel",
    "/v1/responses/compact", "/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items",
    "/v1/conversations/{id}/items/{item_id}",
    # So is a stream that was lost; a conversation is named by its client, within its own key.
    "/v1/chat/completions/{id}/stream", "/v1/completions/{id}/stream", "/v1/messages/{id}/stream",
    "/v1/stream", "/v1/stream/{id:path}", "/v1/streams/lookup",
}  # fmt: skip
"""Paths whose answers are the client's own, or the same for everyone."""


def policy(*, allowed: tuple[str, ...] = (), cors: tuple[str, ...] = (), keys: bool = False) -> OriginPolicy:
    return OriginPolicy(
        names=names_of("mac-studio.example", "Ann.fritz.box"),
        allowed_hosts=HostPatterns(allowed) if allowed else None,
        cors_origins=frozenset(cors),
        needs_key=keys,
    )


def decide(
    policy: OriginPolicy,
    method: str = "GET",
    path: str = "/v1/models",
    *,
    version: str = "1.1",
    **headers: str | list[str],
) -> Code | None:
    """Return the code of the refusal, or None. `headers`: values by name; the default Host is `HERE`."""
    pairs = []
    for name, values in {"host": HERE, **headers}.items():
        for value in [values] if isinstance(values, str) else values:
            pairs.append((name.replace("_", "-").encode(), value.encode("latin-1")))
    try:
        policy.check(method, path, version, pairs)
    except RequestError as error:
        return error.code
    return None


def message(policy: OriginPolicy, path: str = "/v1/models", **headers: str) -> str:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in {"host": HERE, **headers}.items()]
    with pytest.raises(RequestError) as caught:
        policy.check("GET", path, "1.1", pairs)
    return caught.value.message


# --- Host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LocalHost:1", "localhost.", "localhost.:8000", "localhost:",
        "127.0.0.1", "127.9.8.7:65535", "[::1]", "[::1]:8000", "[0:0::1]:8000", "[::ffff:127.0.0.1]:8000",
        "0.0.0.0:8000", "192.168.1.20:8000", "203.0.113.7", "[fe80::1]:8000",
        "mac-studio.example:8000", "ann.fritz.box", "ann:8000", "Ann.local", "ANN.LOCAL.:8000",
        *CONTAINER_HOSTS, f"{CONTAINER_HOSTS[0]}:8000",
    ],
)  # fmt: skip
def test_a_name_of_this_machine_is_served(host: str) -> None:
    assert decide(policy(), host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example", "rebound.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "127.0.0.1.nip.io:8000", "evil-localhost", "localhost.localdomain", "notlocalhost:8000", "evil.local",
        "xn--lcalhost-54a", "evil.fritz.box", "fritz.box", "host.docker.internal.evil.example", "_localhost",
    ],
)  # fmt: skip
def test_any_other_name_is_misdirected(host: str) -> None:
    assert decide(policy(), host=host) is Code.HOST_NOT_ALLOWED
    assert decide(policy(), "GET", "/", host=host) is Code.HOST_NOT_ALLOWED
    assert decide(policy(), host=host, origin=f"http://{host}") is Code.HOST_NOT_ALLOWED


@pytest.mark.parametrize(
    "host",
    [
        "", ":8000", "localhost@evil.example", "evil.example@localhost", "localhost:8000@evil.example:80",
        "localhost:8000:8000", "localhost:x", "localhost:-1", "localhost:123456", "local host", "localhost/",
        "localhost?", "localhost#", "localhost\\evil.example", "localhost,evil.example", "http://localhost",
        "localhost..", ".localhost", "local%68ost", "127.1", "0x7f.0.0.1", "127.0.0.01", "2130706433",
        "[::1", "::1", "[::1]evil.example", "[::1%25lo]", "[127.0.0.1]", "[localhost]", "[]", "[::1]:x",
        "l\xf6calhost", "\xb927.0.0.1", "*", "*.example", "a" * 64, "a." * 127 + "aa",
    ],
)  # fmt: skip
def test_a_host_that_is_none_is_a_bad_request(host: str) -> None:
    assert decide(policy(), host=host) is Code.INVALID_REQUEST
    assert decide(policy(keys=True), host=host) is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("version", "host", "code"),
    [
        ("1.1", [HERE, "evil.example"], Code.INVALID_REQUEST),
        ("1.1", [HERE, HERE], Code.INVALID_REQUEST),
        ("1.1", [], Code.INVALID_REQUEST),
        ("1.0", [], None),
        ("1.0", "evil.example", Code.HOST_NOT_ALLOWED),
    ],
)
def test_a_request_has_one_host(version: str, host: str | list[str], code: Code | None) -> None:
    assert decide(policy(), version=version, host=host) is code
    page = decide(policy(), version=version, host=host, origin="http://evil.example")
    assert page is (code or Code.ORIGIN_NOT_ALLOWED)


def test_allowed_hosts_add_names() -> None:
    named = policy(allowed=("Gateway.Example.", "*.corp.example"))
    for host in ("gateway.example:8000", "GATEWAY.example.", "a.corp.example", "a.b.corp.example", HERE):
        assert decide(named, host=host) is None
    for host in ("corp.example", "evilcorp.example", "a.gateway.example", "gateway.example.evil.example"):
        assert decide(named, host=host) is Code.HOST_NOT_ALLOWED
    assert decide(policy(allowed=("*",)), host="any.example") is None
    assert decide(policy(allowed=("*",)), host="any@example") is Code.INVALID_REQUEST


def test_hosts_are_checked_beside_keys_only_if_some_are_named() -> None:
    assert decide(policy(keys=True), host="any.example") is None
    named = policy(keys=True, allowed=("gateway.example",))
    assert decide(named, host="any.example") is Code.HOST_NOT_ALLOWED
    assert decide(named, host="gateway.example") is None


PORTS = st.one_of(st.just(""), st.integers(0, 65535).map(lambda port: f":{port}"))
LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).filter(lambda labels: labels[-1][0] > "9").map(".".join)


@given(st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map("[{}]".format)), NAMES, PORTS)
def test_address_is_served_and_a_name_only_if_it_is_one_of_ours(address: str, name: str, port: str) -> None:
    assert decide(policy(), host=address + port) is None, "no name was resolved"
    expected = None if name in policy().names else Code.HOST_NOT_ALLOWED
    for host in (name, name.upper(), name + "."):
        assert decide(policy(), host=host + port) is expected


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_text_as_a_host_is_ours_or_refused(text: str) -> None:
    if decide(policy(), host=text) is None:
        host, address, _ = read_authority(text.strip(" \t"))
        assert host in policy().names or isinstance(address, IPv4Address | IPv6Address)


# --- Origin ------------------------------------------------------------------------------------------

FOREIGN = [
    "http://evil.example", "http://127.0.0.1:8001", "http://127.0.0.1",
    "http://localhost:8000", "http://127.0.0.1:8000.evil.example", "http://evil@127.0.0.1:8000", "null", "",
    "file://", "app://obsidian.md", "tauri://localhost", "http://tauri.localhost", "vscode-webview://x",
    "chrome-extension://abc", "127.0.0.1:8000", "http:127.0.0.1:8000", "HTTP://evil.example", "http://",
    "http://127.0.0.1:8000/", "http://[::1]:8000",
]  # fmt: skip


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    for method, path in [("GET", "/v1/models"), ("OPTIONS", "/v1/models"), ("POST", "/v1/chat/completions")]:
        assert decide(policy(), method, path, origin=origin, content_type=JSON) is Code.ORIGIN_NOT_ALLOWED
    assert decide(policy(), origin=[f"http://{HERE}", origin]) is Code.ORIGIN_NOT_ALLOWED


def test_a_refusal_names_the_host_or_the_origin_and_the_setting() -> None:
    assert "`--allowed-hosts gateway.example`" in message(policy(), host="Gateway.Example:8000")
    for origin in ("null", "app://obsidian.md", "tauri://localhost", "chrome-extension://abc"):
        said = message(policy(), origin=origin)
        assert f"`{origin}`" in said
        assert REMEDY in said
    said = message(policy(), origin="http://\x9b31m" + "a" * 10_000)
    assert len(said) < 400
    assert said.isprintable()


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (HERE, f"http://{HERE}"),
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "https://localhost"),  # TLS ends at a proxy
        ("localhost:8443", "https://localhost:8443"),
        ("LOCALHOST:8000", "http://localhost:8000"),
        ("[0::1]:8000", "http://[::1]:8000"),
        ("ann.local:443", "https://ann.local"),
    ],
)
def test_the_servers_own_page_is_served(host: str, origin: str) -> None:
    own = {"host": host, "origin": origin, "sec_fetch_site": "same-origin", "content_type": JSON}
    for path in ("/v1/chat/completions", "/v1/cache"):
        for method in ("POST", "DELETE", "GET"):
            assert decide(policy(), method, path, **own) is None


def test_a_configured_origin_is_served() -> None:
    for configured in ((PAGE,), ("*",), ("null", PAGE)):
        assert decide(policy(cors=configured), "POST", origin=PAGE, content_type=JSON) is None
        assert decide(policy(cors=configured), "OPTIONS", origin=PAGE) is None
    others = (f"{PAGE}:444", f"{PAGE}.evil.example", "http://page.example", "https://PAGE.example")
    for origin in ("null", *others):
        assert decide(policy(cors=(PAGE,)), origin=origin) is Code.ORIGIN_NOT_ALLOWED
    assert decide(policy(cors=("null",)), origin="null") is None


def test_a_key_decides_about_origins() -> None:
    for origin in FOREIGN:
        assert decide(policy(keys=True), "POST", origin=origin, content_type=JSON) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "a-later-word"])
def test_a_resource_of_another_page_is_refused_without_origin(site: str) -> None:
    def ask(method: str, mode: str, path: str = "/v1/models") -> Code | None:
        return decide(policy(), method, path, sec_fetch_site=site, sec_fetch_mode=mode, content_type=JSON)

    assert ask("GET", "no-cors") is ask("HEAD", "cors") is Code.ORIGIN_NOT_ALLOWED
    assert ask("GET", "no-cors", "/v1/status/stream") is Code.ORIGIN_NOT_ALLOWED
    assert ask("POST", "navigate") is ask("DELETE", "navigate") is Code.ORIGIN_NOT_ALLOWED
    assert ask("GET", "navigate", "/") is None  # a link to the page
    assert decide(policy(), sec_fetch_site=site) is Code.ORIGIN_NOT_ALLOWED
    assert decide(policy(cors=("*",)), sec_fetch_site=site) is Code.ORIGIN_NOT_ALLOWED


def test_the_servers_own_resources_and_clients_without_a_browser_are_served() -> None:
    for site in ("same-origin", "none"):
        assert decide(policy(), sec_fetch_site=site, sec_fetch_mode="no-cors") is None
        assert decide(policy(), "GET", "/v1/inspect", sec_fetch_site=site, sec_fetch_mode="cors") is None
    assert decide(policy(), sec_fetch_mode="cors", user_agent="node") is None  # Node's fetch
    for path in ("/v1/cache", "/v1/inspect", "/v1/status", "/metrics"):
        for method in ("GET", "DELETE"):
            assert decide(policy(), method, path) is None


# --- administrative routes ---------------------------------------------------------------------------


def test_each_route_is_administrative_or_public() -> None:
    paths = {route.path for route in ROUTES}
    page = {path for path in paths if path == "/" or path.startswith("/page/")}
    administrative = {path for path in paths if is_administrative(path)}
    assert administrative | PUBLIC_PATHS | page == paths
    assert not administrative & (PUBLIC_PATHS | page)
    for known in ADMINISTRATIVE_PATHS:
        assert any(path == known or path.startswith(f"{known}/") for path in paths), known


@pytest.mark.parametrize(
    "path",
    [
        "/v1/cache", "/v1/inspect", "/v1/inspect/a", "/v1/models/load", "/v1/models/unload", "/v1/models/pin",
        "/v1/models/pull/pull_1/cancel", "/v1/requests/a/cancel", "/v1/status/stream", "/metrics",
    ],
)  # fmt: skip
def test_administration_is_refused_to_other_origins_even_if_they_are_configured(path: str) -> None:
    for origins in ((PAGE,), ("*",)):
        for method in ("GET", "DELETE", "OPTIONS"):
            assert decide(policy(cors=origins), method, path, origin=PAGE) is Code.ORIGIN_NOT_ALLOWED
    assert "API keys" in message(policy(cors=("*",)), path, origin=PAGE)


def test_administration_by_another_origin_takes_a_key_and_a_configured_origin() -> None:
    both, key = policy(cors=(PAGE,), keys=True), policy(keys=True)
    assert decide(both, "DELETE", "/v1/cache", origin=PAGE) is None
    assert decide(key, "DELETE", "/v1/cache", origin=PAGE) is Code.ORIGIN_NOT_ALLOWED
    assert decide(key, "GET", "/metrics", sec_fetch_site="cross-site") is Code.ORIGIN_NOT_ALLOWED
    assert decide(key, "DELETE", "/v1/cache", origin=f"http://{HERE}") is None


# --- content types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("origin", [f"http://{HERE}", PAGE])
def test_a_page_sends_json(origin: str, keys: bool) -> None:
    decider = policy(cors=(PAGE,), keys=keys)
    for type in (JSON, "Application/JSON; charset=utf-8", "application/json ;x=y"):
        assert decide(decider, "POST", content_type=type, content_length="9", origin=origin) is None
    forms = "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""
    for others in (*forms, [JSON, "text/plain"]):
        told = decide(decider, "POST", content_type=others, content_length="9", origin=origin)
        assert told is Code.UNSUPPORTED_CONTENT_TYPE


def test_a_body_without_a_type_is_not_json_and_no_body_needs_none() -> None:
    decider, page = policy(), f"http://{HERE}"
    for framing in ({"content_length": "9"}, {"transfer_encoding": "chunked"}):
        assert decide(decider, "POST", origin=page, **framing) is Code.UNSUPPORTED_CONTENT_TYPE
    for empty in ({}, {"content_length": "0"}):
        assert decide(decider, "POST", origin=page, **empty) is None
    # Other clients send what they like.
    for type in ({"content_type": "application/x-www-form-urlencoded"}, {"content_type": "text/plain"}, {}):
        assert decide(decider, "POST", content_length="9", **type) is None


# --- over real sockets -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("open"), ["--inspect"]) as system:
        system.start_ready_worker()
        yield system


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[System]:
    flags = ["--cors-origin", PAGE, "--allowed-host", "*.corp.example", "--inspect"]
    with running_system(tmp_path, flags) as system:
        system.start_ready_worker()
        yield system


def ask_raw(system: System, head: str, body: bytes = b"") -> tuple[int, dict[str, object]]:
    """Send a request; return the status and the JSON document of its response."""
    with socket.create_connection(("127.0.0.1", system.port), timeout=20) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    _, _, text = answer.partition(b"\r\n\r\n")
    return int(answer[9:12]), json.loads(text) if text else {}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/models HTTP/1.1\nHost: rebound.example:8000", 421),
        ("GET /v1/models HTTP/1.1\nHost: localhost\nHost: rebound.example", 400),
        ("GET /v1/models HTTP/1.1\nx-forwarded-host: localhost\nHost: rebound.example", 421),
        ("GET http://rebound.example/v1/models HTTP/1.1\nHost: localhost", 421),
        ("GET HTTP://[::1]:8000/v1/models?a=://b HTTP/1.1\nHost: x", 200),
        ("GET /health HTTP/1.1\nHost: any.example", 200),
        ("DELETE /v1/cache HTTP/1.1\nHost: localhost\nOrigin: http://localhost:1", 403),
        ("DELETE /v1/cache HTTP/1.1\nHost: localhost", 200),
    ],
)
def test_the_gateway_decides_the_same_over_a_socket(head: str, status: int, system: System) -> None:
    assert ask_raw(system, head + "\nConnection: close")[0] == status


def test_no_page_of_another_origin_reads_changes_or_asks_anything(system: System) -> None:
    def finished() -> str:
        return system.http.get("/metrics").text.partition("roundhouse_requests_total{")[2].partition("\n")[0]

    before, body = finished(), json.dumps(chat_body("hello !tokens=1"))
    attempts = [("GET", "/v1/status"), ("DELETE", "/v1/cache"), ("GET", "/v1/inspect"), ("GET", "/")]
    for headers in ({"host": "rebound.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        for method, path in attempts:
            assert system.http.request(method, path, headers=headers).status_code in (403, 421)
        for type in (JSON, "text/plain"):
            typed = {**headers, "content-type": type}
            told = system.http.post("/v1/chat/completions", content=body, headers=typed)
            assert told.status_code in (403, 421)
            assert "access-control-allow-origin" not in told.headers
    assert finished() == before
    page = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    for path in ("/", "/page/main.js", "/v1/status", "/v1/inspect", "/v1/cache"):
        assert system.http.get(path, headers=page).status_code == 200
    assert system.http.get("/v1/inspect").json()["data"] == []


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "rebound.example"}, 421, "host_not_allowed"),
        ({"origin": "null"}, 403, "origin_not_allowed"),
        ({"content-type": "text/plain", "origin": "here"}, 415, "unsupported_content_type"),
    ],
)
def test_refusal_has_its_apis_shape(headers: dict[str, str], status: int, code: str, system: System) -> None:
    headers = {name: system.url if value == "here" else value for name, value in headers.items()}
    body = json.dumps(chat_body("hello", max_tokens=1))
    told = system.http.post("/v1/chat/completions", content=body, headers=headers)
    assert (told.status_code, told.json()["error"]["code"]) == (status, code)
    assert told.headers["x-request-id"]
    told = system.http.post("/v1/messages", content=body, headers=headers)
    document = told.json()
    kind = "permission_error" if status == 403 else "invalid_request_error"
    assert (told.status_code, document["type"], document["error"]["type"]) == (status, "error", kind)
    assert document["request_id"] == told.headers["x-request-id"]


def test_configured_origins_and_hosts_are_served_and_administer_nothing(configured: System) -> None:
    page = {"origin": PAGE, "sec-fetch-site": "cross-site", "host": "gateway.corp.example"}
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    told = configured.http.options("/v1/chat/completions", headers=page | asking)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, PAGE)
    body = chat_body("hello !tokens=1")
    told = configured.http.post("/v1/chat/completions", json=body, headers=page)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, PAGE)
    told = configured.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers=page | {"content-type": "text/plain"}
    )
    assert told.status_code == 415
    for method, path in (
        ("DELETE", "/v1/cache"), ("GET", "/v1/inspect"), ("GET", "/v1/status"), ("OPTIONS", "/v1/cache"),
    ):  # fmt: skip
        told = configured.http.request(method, path, headers=page)
        assert (told.status_code, told.json()["error"]["code"]) == (403, "origin_not_allowed")
