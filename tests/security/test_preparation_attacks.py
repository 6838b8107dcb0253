"""Expensive prompts, images and tools hold up no one else before the scheduler of a real worker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest

from tests.images import data_url
from tests.security import payloads
from tests.system import NO_TLS, System, chat_body, eventually, running_system

CALM_S, HI_S_MAX, REFUSAL_S_MAX = 0.1, 2.0, 10.0
"""Time of a short answer without an attack, its limit beside one, and the limit of a refusal, on a machine on
which nothing else runs. Limits grow with the time that is measured without an attack."""
GROWTH_BYTES_MAX = 200 * 10**6
SIDE = 8100
IMAGE_BYTES = SIDE * SIDE * 4
"""One image in Pillow's memory: it has to be decoded whole."""
ATTACK_S_MAX = 300.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("preparation")) as system:
        system.start_ready_worker(module="worker")
        yield system


def hi(system: System) -> float:
    """Ask for one token; return the seconds that it took."""
    began = time.monotonic()
    reply = system.http.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1))
    assert reply.status_code == 200, reply.text
    return time.monotonic() - began


class Attack(threading.Thread):
    """A chat request, whose client leaves after a while if that is given.

    `growth`: bytes that the worker's resident memory has grown by at most. `took_s`: until its refusal.
    """

    def __init__(self, system: System, body: bytes, leave_after_s: float = ATTACK_S_MAX) -> None:
        super().__init__()
        self._system, self._body, self._patience = system, body, leave_after_s
        self.reply: httpx.Response | None = None
        self.took_s = 0.0

    def run(self) -> None:
        began = time.monotonic()
        times = httpx.Timeout(ATTACK_S_MAX, read=self._patience)
        headers = {"content-type": "application/json"}
        with httpx.Client(timeout=times, verify=NO_TLS) as client:
            try:
                url = f"{self._system.url}/v1/chat/completions"
                self.reply = client.post(url, content=self._body, headers=headers)
            except httpx.ReadTimeout:
                return
        self.took_s = time.monotonic() - began


@contextmanager
def holding_no_one_up(system: System, *attacks: Attack, growth_max: int = GROWTH_BYTES_MAX) -> Iterator[None]:
    """Run attacks; check that short answers beside them take no longer than they may, and the memory."""
    stats = system.workers[0].stats
    slower = max(1.0, sorted(hi(system) for _ in range(7))[3] / CALM_S)
    before = most = stats.memory_info().rss
    for attack in attacks:
        attack.start()
    yield
    waits = []
    while any(attack.is_alive() for attack in attacks):
        waits.append(hi(system))
        most = max(most, stats.memory_info().rss)
    assert waits
    assert max(waits) < HI_S_MAX * slower
    assert max(attack.took_s for attack in attacks) < REFUSAL_S_MAX * slower
    assert most - before < growth_max


def preparation(system: System) -> dict[str, int]:
    [worker] = system.http.get("/v1/status", params={"history": "false"}).json()["workers"]
    return dict(worker["preparation"])


def wait_idle(system: System) -> None:
    def is_idle() -> bool:
        now = preparation(system)
        return now["waiting"] == now["running"] == 0

    eventually(is_idle, within_s=60, what="nothing is prepared any more")


def test_prompts_of_megabytes_hold_no_one_up_and_are_refused_or_dropped(system: System) -> None:
    body = json.dumps(chat_body("x y" * 2_700_000)).encode()
    leaving = [Attack(system, body, leave_after_s=0.5) for _ in range(2)]
    staying = Attack(system, body)
    with holding_no_one_up(system, *leaving, staying):
        pass
    assert staying.reply.status_code == 400
    assert staying.reply.json()["error"]["code"] == "context_length_exceeded"
    wait_idle(system)


@cache
def large_image() -> bytes:
    return payloads.rgb_png(SIDE, SIDE)


def images(count: int) -> bytes:
    """Return a chat request with large images, whose files all differ."""
    urls = [data_url(large_image() + bytes([number])) for number in range(count)]
    return json.dumps(payloads.image_chat(*urls)).encode()


def test_large_images_hold_no_one_up_and_are_decoded_one_at_a_time(system: System) -> None:
    attacks = [Attack(system, images(2), leave_after_s=6.0) for _ in range(2)]
    with holding_no_one_up(system, *attacks, growth_max=IMAGE_BYTES + GROWTH_BYTES_MAX):
        eventually(lambda: preparation(system)["running"], within_s=60, what="an image is decoded")
    wait_idle(system)


def test_images_of_one_request_are_bounded_in_total(system: System) -> None:
    attack = Attack(system, images(11))  # of which those of the test before are not decoded again
    attack.run()
    assert attack.reply.status_code == 400
    assert "pixels in total" in attack.reply.json()["error"]["message"]


def test_thousands_of_tools_are_refused_in_time_and_hold_no_one_up(system: System) -> None:
    def tool(number: int) -> dict[str, Any]:
        fields = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,9}}{number}{n}$"} for n in range(4)}
        parameters = {"type": "object", "properties": fields, "required": list(fields)}
        return {"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}}

    body = chat_body("hi", tools=[tool(number) for number in range(5000)], tool_choice="required")
    attacks = [Attack(system, json.dumps(body).encode()) for _ in range(2)]
    with holding_no_one_up(system, *attacks):
        pass
    assert [attack.reply and attack.reply.status_code for attack in attacks] == [400, 400]
