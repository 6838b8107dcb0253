"""`python -m tests.faults.gateway_ends`: kill -9 and reloads of the gateway under clients of three kinds.

Keyed answers, answers in the background, and short ones that no gateway keeps, over open connections. No
request may be refused, and no text may differ from that of an undisturbed run; only answers that no gateway
keeps may be cut, by a kill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.retrying import DIALECTS, RetryingClient
from tests.faults.runner import run_program
from tests.faults.serving import Served, serving
from tests.faults.streams import scripted
from tests.system import NO_TLS, chat_body, eventually, sse_documents

STEP = "--step-ms 5 --max-running 64"
SHORT = "!tokens=5"
WAIT_S = 0.05
ANSWER_S_MAX = 120.0
RECOVERED_S_MAX = 60.0


@dataclass(slots=True)
class Tally:
    """What the clients got. `cut`: answers that no gateway keeps, without their end."""

    answers: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, text: str | None, expected: str) -> None:
        with self.lock:
            self.answers += 1
            self.wrong += [] if text == expected else [f"{what}: {text!r:.200}"]


class Asker(threading.Thread):
    """A client that asks one question after another until `over` is set, and waits for each answer."""

    def __init__(self, url: str, number: int, tokens: int, over: threading.Event, tally: Tally) -> None:
        super().__init__()
        self._url, self._number, self._over, self._tally = url, number, over, tally
        self._round = 0
        self._prompt = f"{'go ' * (1 + number % 7)}!tokens={tokens}"
        self._http = httpx.Client(base_url=url, timeout=60, verify=NO_TLS)

    def run(self) -> None:
        kinds = (self._ask_with_a_key, self._ask_in_the_background, self._ask_shortly, self._ask_shortly)
        with self._http:
            for self._round in itertools.count():
                kinds[self._number % len(kinds)](f"{self._number}-{self._round}")
                if self._over.is_set():
                    return

    def _ask_with_a_key(self, key: str) -> None:
        turn = self._number // 4 + self._round
        dialect, stream = DIALECTS[turn % len(DIALECTS)], turn // len(DIALECTS) % 2 == 0
        client = RetryingClient(self._url, dialect, self._prompt, key, stream=stream)
        client.run()
        refused = [f"{client.refusals} times refused"] if client.refusals else []
        told = " ".join([f"{dialect} with a key", client.wrong, *refused])
        self._tally.count(told, None if refused else client.text, scripted(self._prompt, self._tokens))

    @property
    def _tokens(self) -> int:
        return int(self._prompt.rpartition("=")[2])

    def _ask_in_the_background(self, key: str) -> None:
        body = {"model": "fake", "input": self._prompt, "background": True}
        headers = {"idempotency-key": key}
        document = self._retried("POST", "/v1/responses", json=body, headers=headers)
        deadline = time.monotonic() + ANSWER_S_MAX
        while document.get("status") in ("queued", "in_progress") and time.monotonic() < deadline:
            self._over.wait(WAIT_S)
            document = self._retried("GET", f"/v1/responses/{document['id']}")
        is_over = document.get("status") == "completed"
        text = document["output"][0]["content"][0]["text"] if is_over else str(document)
        self._tally.count("in the background", text, scripted(self._prompt, self._tokens))

    def _retried(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        """Return the document of an answer; a lost connection is made again, as SDKs do."""
        deadline = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < deadline:
            try:
                document: dict[str, Any] = self._http.request(method, path, **fields).json()
                return document
            except httpx.TransportError:
                time.sleep(WAIT_S)
        return {"status": f"no answer within {ANSWER_S_MAX} s"}

    def _ask_shortly(self, key: str) -> None:
        stream = self._number % 8 < 4
        try:
            answer = self._http.post("/v1/chat/completions", json=chat_body(SHORT, stream=stream))
        except httpx.TransportError:
            with self._tally.lock:
                self._tally.cut += 1
            return
        text = answer.text
        if answer.is_success and not stream:
            text = answer.json()["choices"][0]["message"]["content"]
        elif answer.is_success:
            text = _joined(answer.text)
        self._tally.count(f"short, {answer.status_code}", text, scripted(SHORT, 5))


def _joined(stream: str) -> str:
    documents = [json.loads(event) for event in sse_documents(iter(stream.split("\n"))) if event != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for each in documents for choice in each["choices"])


def end_gateways(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """End the gateway `kills` times by kill -9 and `reloads` times by a reload, in a random order."""
    dice, tally, over = random.Random(given.seed), Tally(), threading.Event()
    ends = given.kills * ["kill"] + given.reloads * ["reload"]
    dice.shuffle(ends)
    cut = dict.fromkeys(("kill", "reload"), 0)
    with serving(folder, STEP) as served:
        askers = [Asker(served.url, n, given.tokens, over, tally) for n in range(given.clients)]
        for asker in askers:
            asker.start()
        try:
            for end in ends:
                over.wait(dice.uniform(0.2, 0.2 + given.interval))
                before = tally.cut
                tally.wrong += _end(served, by_kill=end == "kill")
                cut[end] += tally.cut - before
        finally:
            over.set()
            for asker in askers:
                asker.join(2 * ANSWER_S_MAX)
        left = served.status()["gateway"]["in_flight"]
    waiting = sum(asker.is_alive() for asker in askers)
    print(f"{tally.answers} answers; cut by kills {cut['kill']}, by reloads {cut['reload']}", flush=True)
    tally.wrong += [f"reloads cut {cut['reload']} short answers"] if cut["reload"] else []
    tally.wrong += [f"{waiting} clients are still waiting"] if waiting else []
    return tally.wrong + ([f"{left} requests are left"] if left else [])


def _end(served: Served, *, by_kill: bool) -> list[str]:
    """End the gateway, and wait until the next one serves with its worker."""
    before = served.gateway_pids()
    if by_kill:
        os.kill(before[-1], signal.SIGKILL)
    else:
        done, text = served.reload(gateway=True)
        if not done:
            return [f"reload: {text}"]
    eventually(
        lambda: served.gateway_pids() != before and served.workers("ready"),
        within_s=RECOVERED_S_MAX,
        what="another gateway has its worker",
    )
    return []


if __name__ == "__main__":
    options: dict[str, Any] = {
        "--kills": 30,
        "--reloads": 30,
        "--clients": 16,
        "--tokens": 150,
        "--interval": 1.0,
        "--seed": 1,
    }
    run_program(__doc__, end_gateways, options)
