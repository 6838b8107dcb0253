"""API keys: valid keys, and the headers of a request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from broker.middleware import auth
from broker.middleware.auth import ApiKeys, AuthMiddleware, offered
from broker.middleware.context import RequestContext, RequestContextMiddleware, context_of
from broker.middleware.errors import error_response
from broker.middleware.media_memory import MediaLease, MediaMemory
from protocol.common.api_keys import ApiKey, KeysError
from protocol.errors import Code, RequestError
from tests.broker.asgi import Exchange
from tests.broker.dispatcher_line import refusal

GOOD = "rh-0123456789abcdef"
OTHER = "rh-fedcba9876543210"

Headers = Iterable[tuple[bytes, bytes]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, f"{GOOD} ann\n")
    return path


def write(path: Path, text: str) -> None:
    """Replace the file atomically."""
    offload = path.with_name("aside")
    offload.write_text(text, encoding="utf-8")
    offload.chmod(0o600)
    offload.replace(path)


# --- valid keys --------------------------------------------------------------------------------------


def test_keys_of_the_settings_and_of_the_file_are_in_force_together(file: Path) -> None:
    ring = ApiKeys([OTHER], file)
    assert ring.required
    assert len(ring.prefix_namespaces) == 2
    assert ApiKeys().prefix_namespaces == set()
    assert [key.name for key in map(ring.find, [GOOD.encode(), OTHER.encode()]) if key] == ["ann", "key 1"]
    assert ring.find(b"another") is None
    for wrong in ("", "a b", "ключ", "a\n", "a,b"):
        with pytest.raises(KeysError, match="API key 2"):
            ApiKeys([GOOD, wrong])


def test_a_file_that_others_can_open_or_that_another_owns_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="0600"):
        ApiKeys((), file)
    strangers = os.geteuid() + 1
    if os.geteuid() == 0:
        os.chown(file, strangers, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: strangers)
    with pytest.raises(PermissionError, match="owned by you"):
        ApiKeys((), file)


def test_a_new_file_counts_from_the_next_request_on(file: Path) -> None:
    ring = ApiKeys((), file)
    assert ring.find(GOOD.encode())
    write(file, f"{OTHER} bo\n")
    assert ring.find(GOOD.encode()) is None
    assert ring.find(OTHER.encode()) == ApiKey.of(OTHER, "bo", "")
    for number in range(50):
        key = f"key-{number:04}"  # same length, written in place within one tick of the file system's clock
        file.write_text(key)
        assert ring.find(key.encode())
        assert ring.find(OTHER.encode()) is None


def test_a_file_is_read_again_until_it_has_settled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ApiKeys((), file)
    # Simulates a change within one tick of the file system's clock, invisible in the file's status.
    monkeypatch.setattr(auth, "read_private", lambda path: OTHER.encode())
    assert ring.find(OTHER.encode())
    monkeypatch.undo()
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    assert ring.find(GOOD.encode())
    monkeypatch.setattr(auth, "read_private", lambda path: pytest.fail("read again"))
    assert ring.find(GOOD.encode())


SPOILERS: dict[str, Callable[[Path], None]] = {
    "gone": lambda path: path.unlink(), "open to others": lambda path: path.chmod(0o644),
    "empty": lambda path: write(path, ""), "malformed": lambda path: write(path, "ключ\n"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_a_file_that_cannot_be_taken_any_more_locks_nobody_out(
    spoil: Callable[[Path], None], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = ApiKeys((), file)
    spoil(file)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert ring.find(GOOD.encode())
            assert ring.find(OTHER.encode()) is None
    assert len(caplog.records) == 1
    assert GOOD not in caplog.text
    write(file, OTHER)
    assert ring.find(OTHER.encode())
    assert ring.find(GOOD.encode()) is None


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [f"key-{number}" for number in range(5)]
    ring = ApiKeys(given)
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for offer in ("key-0", "key-4", "key-", "none", ""):
        compared.clear()
        found = ring.find(offer.encode())
        assert (found is not None) == (offer in given)
        digest = hashlib.sha256(offer.encode()).digest()
        assert [other for _, other in compared] == [digest] * 5
        assert len({one for one, _ in compared}) == 5


# --- keys of a request -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], []),
        ([(b"authorization", b"bEARER \t k \t")], [b"k"]),
        ([(b"x-api-key", b" k ")], [b"k"]),
        ([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")], [b"a", b"b"]),
        ([(b"authorization", b"Basic k")], []),
        ([(b"authorization", b"Bearer\tk")], []),
        ([(b"authorization", b"Bearer k, Bearer k")], [b"k, Bearer k"]),
        ([(b"api-key", b"k"), (b"cookie", b"x-api-key=k"), (b"proxy-authorization", b"Bearer k")], []),
    ],
)
def test_a_key_comes_in_one_of_two_headers(headers: Headers, found: list[bytes]) -> None:
    assert offered(headers) == found


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_a_header_that_comes_twice_is_refused(name: bytes) -> None:
    error = refusal(offered, [(name, b"Bearer k"), (b"accept", b"*/*"), (name, b"Bearer k")])
    assert error.code is Code.INVALID_API_KEY
    assert name.decode() in error.message


async def _inside(scope: Scope, receive: Receive, send: Send) -> None:
    """Application behind the middleware: answers 400 with the name of the request's key."""
    key = context_of(scope).key
    named = key.name if key else "nobody"
    await error_response(RequestError(Code.INVALID_REQUEST, named))(scope, receive, send)


def ask(ring: ApiKeys, headers: Headers = (), path: str = "/v1/models", method: str = "GET") -> Exchange:
    app = RequestContextMiddleware(AuthMiddleware(_inside, ring), MediaMemory(0))
    return Exchange(app, method, path, headers=headers)


async def test_with_a_key_in_force_a_request_goes_in_under_its_name() -> None:
    ring = ApiKeys([GOOD, OTHER])
    for headers, name in (
        ([(b"authorization", b"Bearer " + GOOD.encode())], "key 1"),
        ([(b"authorization", b"Basic x"), (b"x-api-key", OTHER.encode())], "key 2"),
        ([(b"authorization", b"Bearer " + OTHER.encode()), (b"x-api-key", GOOD.encode())], "key 2"),
    ):
        assert (await ask(ring, headers).end()).error["message"] == name
    assert (await ask(ApiKeys()).end()).error["message"] == "nobody"


WRONG = [
    b" ", GOOD[:-1].encode(), GOOD.upper().encode(), GOOD.encode() + b" " + GOOD.encode(), b"k" * 60_000,
    GOOD.encode().replace(b"0", "０".encode()), hashlib.sha256(GOOD.encode()).hexdigest().encode(),
]  # fmt: skip


@pytest.mark.parametrize("offer", WRONG, ids=range(len(WRONG)))
async def test_a_wrong_key_is_refused_in_openais_shape_and_named_nowhere(
    offer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ring = ApiKeys([GOOD])
    for headers in ([(b"authorization", b"Bearer " + offer)], [(b"x-api-key", offer)]):
        answer = ask(ring, headers)
        assert await answer.refusal() == (401, "invalid_api_key", None)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["www-authenticate"] == 'Bearer realm="roundhouse"'
    assert GOOD not in caplog.text
    assert len(offer) < 4 or offer.decode("latin-1") not in caplog.text


async def test_health_and_readiness_are_for_everybody_and_nothing_else_is() -> None:
    for path in ("/health", "/ready"):
        assert (await ask(ApiKeys([GOOD]), path=path).end()).status == 400
    for path in ("/", "/v1/status", "/v1/models", "/health/", "/Health", "//health", "/health/x"):
        for method in ("GET", "OPTIONS"):
            assert (await ask(ApiKeys([GOOD]), path=path, method=method).end()).status == 401


async def test_a_name_of_a_path_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await ask(ApiKeys([GOOD]), path="/v1\n12:00:00 gateway all is well").end()
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]


def client_of(key: ApiKey | None, host: str) -> str:
    return RequestContext("id", MediaLease(MediaMemory(0)), host, key).client


def test_client_is_its_key_or_its_address_and_shows_neither() -> None:
    one, other = (ApiKey.of(text, "someone", "here") for text in "ab")
    addresses = [client_of(None, address) for address in ("10.0.0.1", "10.0.0.2", "")]
    assert len({client_of(one, "10.0.0.1"), client_of(other, "10.0.0.1"), *addresses}) == 5
    name = client_of(one, "10.0.0.1")
    assert name == client_of(one, "10.0.0.9")
    assert len(name) == 16
    assert name not in one.digest.hex()
    assert addresses[0] != hashlib.blake2b(b"10.0.0.1", digest_size=8).hexdigest()
