"""API keys with a real gateway and real connections; keys must not appear in any output."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from protocol import sockets
from tests.system import NO_TLS, START_S_MAX, System, chat_body, eventually, free_port, running_system, stable

KEY, OTHER = "rh-9f2c4e7a1b", "rh-2"
GROWTH_BYTES_MAX = 16 * 2**20


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    aside = path.with_name("aside")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.replace(path)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a system with two keys, in the file `folder / "keys"`."""
    folder = tmp_path_factory.mktemp("keyed")
    write(folder / "keys", f"{KEY} ann\n{OTHER} bo\n")
    with running_system(folder, ["--api-keys-file", str(folder / "keys"), "--log-level", "debug"]) as system:
        system.start_ready_worker()
        yield system


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_with_the_key_an_answer_comes_and_without_it_a_401_and_the_log_has_no_key(keyed: System) -> None:
    body = chat_body("hi !tokens=2")
    for headers in (bearer(KEY), {"X-API-Key": KEY}, {"AUTHORIZATION": f"bearer {KEY}"}):
        assert keyed.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    for headers in ({}, bearer("offered-and-wrong"), {"x-api-key": KEY[:-1]}, {"api-key": KEY}):
        refused = keyed.http.post("/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Bearer ")
        assert refused.json()["error"]["code"] == "invalid_api_key"
    eventually(lambda: "ann: " in keyed.gateway.log(), within_s=60, what="the log names the owner")
    assert KEY not in keyed.gateway.log()
    assert "offered-and-wrong" not in keyed.gateway.log()


GIVEN = KEY.encode()
TRICKS = [
    b"authorization: Bearer " + GIVEN + b"\r\nauthorization: Bearer " + GIVEN,
    b"Authorization: Bearer " + GIVEN + b"\r\nAUTHORIZATION: Bearer wrong",
    b"x-api-key: " + GIVEN + b"\r\nX-Api-Key: " + GIVEN,
    b"authorization: Bearer\xc2\xa0" + GIVEN,
    b"authorization: Bearer " + GIVEN + b"\x00",
    b"authorization: Bearer " + GIVEN + b", Bearer " + GIVEN,
    b"authorization: Bearer wrong\r\n " + GIVEN,
    b"authorization: " + GIVEN,
    b"authorization : Bearer " + GIVEN,
    b"x_api_key: " + GIVEN,
    b"x-api-key: \xff\xfe\xfd",
    b"x-api-key: " + GIVEN.upper(),
    b"x-api-key: " + GIVEN * 1000,
    b"x-api-key: ann",
    b"cookie: authorization=Bearer " + GIVEN,
    b"proxy-authorization: Bearer " + GIVEN,
    b"x-forwarded-for: 127.0.0.1",
]


def test_no_trick_with_headers_opens_the_door(keyed: System) -> None:
    assert _status(keyed, b"x-api-key: " + GIVEN) == b"200"
    for trick in TRICKS:
        assert _status(keyed, trick) in (b"400", b"401"), trick


def _status(system: System, header: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", system.port), timeout=60) as connection:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        connection.sendall(head + header + b"\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))[9:12]


def in_flight(system: System) -> int:
    return int(system.http.get("/v1/status", headers=bearer(KEY)).json()["gateway"]["in_flight"])


def test_hundreds_of_refusals_leave_nothing_behind(keyed: System) -> None:
    stats = keyed.gateway.stats

    def refuse(count: int) -> None:
        for number in range(count):
            if number % 4:  # on the open connection
                headers = bearer(f"wrong-{number}") if number % 3 else {}
                assert keyed.http.get("/v1/status", headers=headers).status_code == 401
            else:  # on a new connection
                assert _status(keyed, b"x-api-key: wrong-%d" % number) == b"401"

    refuse(50)
    descriptors = stable(stats.num_fds, within_s=60, what="descriptors of the gateway")
    threads = stable(stats.num_threads, within_s=60, what="threads of the gateway")
    resident = stats.memory_info().rss
    refuse(400)
    # The gateway closes a connection a moment after the client has noticed its end.
    eventually(lambda: stats.num_fds() <= descriptors, within_s=60, what="no descriptor is left")
    eventually(lambda: stats.num_threads() <= threads, within_s=60, what="no thread is left")
    assert stats.memory_info().rss - resident < GROWTH_BYTES_MAX
    eventually(lambda: in_flight(keyed) == 0, within_s=60, what="no request is left")


def test_keys_that_change_under_load_are_in_force_at_once_and_nobody_else_is_refused(keyed: System) -> None:
    file = keyed.folder / "keys"
    over = threading.Event()
    refusals: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=keyed.url, timeout=60, headers=bearer(KEY), verify=NO_TLS) as http:
            while not over.is_set():
                status = http.post("/v1/chat/completions", json=chat_body("hi !tokens=1")).status_code
                if status != 200:
                    refusals.append(status)

    load = [threading.Thread(target=ask) for _ in range(2)]
    for thread in load:
        thread.start()
    try:
        for number in range(20):
            write(file, f"{KEY} ann\nrh-{number} bo\n")
            assert keyed.http.get("/v1/models", headers=bearer(f"rh-{number}")).status_code == 200
            assert keyed.http.get("/v1/models", headers=bearer(f"rh-{number - 1}")).status_code == 401
    finally:
        over.set()
        for thread in load:
            thread.join()
    assert refusals == []


# --- remote connections ------------------------------------------------------------------------------


def refusal_at_start(*flags: str) -> str:
    """Start a gateway that must exit with EX_CONFIG, and return its message."""
    argv = [sys.executable, "-m", "broker", "--port", str(free_port()), *flags]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=START_S_MAX, check=False)
    assert ended.returncode == 78, ended.stderr
    return ended.stderr


def test_a_gateway_that_others_can_reach_needs_keys_that_can_be_taken(tmp_path: Path) -> None:
    endpoint = f"--endpoint=ipc://{tmp_path}/line"
    assert "there are no API keys" in refusal_at_start("--host", "0.0.0.0", endpoint)
    write(tmp_path / "keys", KEY)
    flag = f"--api-keys-file={tmp_path / 'keys'}"
    with running_system(tmp_path, ["--host", "0.0.0.0", flag]):
        pass
    (tmp_path / "keys").chmod(0o644)
    assert "0600" in refusal_at_start(flag, endpoint)
    told = refusal_at_start("--api-key", "two words", endpoint)
    assert "API key 1" in told
    assert "two words" not in told


def test_a_worker_with_the_keys_serves_over_tcp_and_one_without_is_never_heard(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        sockets.write_keys(folder)
    endpoint = f"tcp://0.0.0.0:{free_port()}"
    with running_system(tmp_path, ["--endpoint", endpoint, "--curve-keys", str(ours)]) as system:
        system.endpoint = endpoint.replace("0.0.0.0", "127.0.0.1")
        stranger = system.start_worker("--name", "stranger", "--curve-keys", str(theirs))
        system.start_ready_worker("--name", "known", "--curve-keys", str(ours))
        listed = [model["id"] for model in system.http.get("/v1/models").json()["data"]]
        assert listed == ["known"]
        answer = system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=2"))
        assert answer.status_code == 200
        assert stranger.running
