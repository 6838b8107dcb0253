"""Expensive prompts, images and tools hold up no one else before the scheduler of a real worker."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.system import NO_TLS, Process, System, chat_body, eventually, running_system

HI_S_MAX = 2.0
GROWTH_BYTES_MAX = 200 * 10**6
IMAGE_BYTES = 8100 * 8100 * 4
"""One image of 8,100 by 8,100 pixels in Pillow's memory: it has to be decoded whole."""
ATTACK_S_MAX = 60.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("preparation")) as system:
        system.start_worker(module="worker")
        system.wait_ready()
        for _ in range(5):
            hi(system)
        yield system


def hi(system: System) -> float:
    """Ask for one token; return the seconds that it took."""
    began = time.monotonic()
    reply = system.http.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1))
    assert reply.status_code == 200, reply.text
    return time.monotonic() - began


def post(system: System, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return system.http.post("/v1/chat/completions", content=body, headers=headers)


def leave(system: System, body: bytes, after_s: float) -> None:
    """Send a chat request, and disconnect after a while."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", system.port), timeout=ATTACK_S_MAX) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(after_s)  # the client's own patience


def status(system: System) -> dict[str, Any]:
    [worker] = system.http.get("/v1/status", params={"history": "false"}).json()["workers"]
    preparation: dict[str, Any] = worker["preparation"]
    return preparation


class Footprint:
    """The largest resident memory of a process while it is watched."""

    def __init__(self, process: Process) -> None:
        self._stats, self._stopped = process.stats, threading.Event()
        self.before = self.most = process.stats.memory_info().rss
        self._thread = threading.Thread(target=self._watch)

    @property
    def growth(self) -> int:
        return self.most - self.before

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            self.most = max(self.most, self._stats.memory_info().rss)

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()


@contextmanager
def attacked(attack: Callable[[], object], count: int) -> Iterator[None]:
    """Run an attack on several threads, and wait for their end."""
    threads = [threading.Thread(target=attack) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(ATTACK_S_MAX)
    assert not any(thread.is_alive() for thread in threads)


def idle(system: System) -> bool:
    preparation = status(system)
    return preparation["waiting"] == preparation["running"] == 0


def test_prompts_of_megabytes_whose_clients_left_hold_no_one_up(system: System) -> None:
    body = json.dumps(chat_body("x y" * 2_700_000)).encode()
    with Footprint(system.workers[0]) as footprint, attacked(lambda: leave(system, body, 0.8), 2):
        time.sleep(0.9)
        waits = [hi(system) for _ in range(10)]
        eventually(lambda: idle(system), within_s=5, what="nothing is prepared any more")
    assert max(waits) < HI_S_MAX
    assert footprint.growth < GROWTH_BYTES_MAX


def test_prompt_far_beyond_the_context_is_refused_in_seconds(system: System) -> None:
    body = json.dumps(chat_body("x y" * 4_000_000)).encode()
    began = time.monotonic()
    with Footprint(system.workers[0]) as footprint:
        reply = system.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 5
    assert footprint.growth < GROWTH_BYTES_MAX


@cache
def large_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8100, 8100)).save(file, "PNG")
    return file.getvalue()


def images(count: int) -> bytes:
    """Return a chat request with images of 8,100 by 8,100 pixels, whose files all differ."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Compare."}]
    for number in range(count):
        url = "data:image/png;base64," + b64encode(large_image() + bytes([number])).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


def test_large_images_hold_no_one_up_and_are_decoded_one_at_a_time(system: System) -> None:
    body = images(3)
    with Footprint(system.workers[0]) as footprint, attacked(lambda: leave(system, body, 6.0), 2):
        eventually(lambda: status(system)["running"], within_s=20, what="an image is decoded")
        waits = [hi(system) for _ in range(10)]
    eventually(lambda: idle(system), within_s=10, what="nothing is decoded any more")
    assert max(waits) < HI_S_MAX
    assert footprint.growth < IMAGE_BYTES + GROWTH_BYTES_MAX


def test_images_of_one_request_are_bounded_in_total(system: System) -> None:
    reply = system.http.post(
        "/v1/chat/completions", content=images(9), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert "pixels in total" in reply.json()["error"]["message"]


def test_thousands_of_tools_are_refused_in_time_and_hold_no_one_up(system: System) -> None:
    def tool(number: int) -> dict[str, Any]:
        fields = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,9}}{number}{n}$"} for n in range(4)}
        parameters = {"type": "object", "properties": fields, "required": list(fields)}
        return {"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}}

    body = chat_body("hi", tools=[tool(number) for number in range(5000)], tool_choice="required")
    answers: list[tuple[int, float]] = []

    def attack() -> None:
        began = time.monotonic()
        with httpx.Client(timeout=ATTACK_S_MAX, verify=NO_TLS) as client:
            reply = client.post(f"{system.url}/v1/chat/completions", json=body)
        answers.append((reply.status_code, time.monotonic() - began))

    with attacked(attack, 2):
        waits = [hi(system) for _ in range(10)]
    assert max(waits) < HI_S_MAX
    assert [code for code, _ in answers] == [400, 400]
    assert max(seconds for _, seconds in answers) < 15
