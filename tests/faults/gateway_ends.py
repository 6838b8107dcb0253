"""Ends of the gateway and reloads of the worker under clients: `python -m tests.faults.gateway_ends`.

The clients ask for keyed answers, and for short ones that no gateway keeps. No request may be refused, and no
text may differ from that of an undisturbed run; only answers that no gateway keeps may be cut, by a kill.
Answers in the background are part of `tests.faults.power_failures`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.dialects import DIALECTS
from tests.faults.retrying import RetryingClient
from tests.faults.runner import run_program
from tests.faults.several import Served, serving
from tests.faults.streams import joined_text, scripted
from tests.system import NO_TLS, chat_body, eventually

STEP = "--step-ms 5 --max-running 64"
SHORT = "!tokens=5"
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
        ask = self._ask_shortly if self._number % 2 else self._ask_with_a_key
        with self._http:
            for self._round in itertools.count():
                ask(f"{self._number}-{self._round}")
                if self._over.is_set():
                    return

    def _ask_with_a_key(self, key: str) -> None:
        turn = self._number // 2 + self._round
        dialect, stream = DIALECTS[turn % len(DIALECTS)], turn // len(DIALECTS) % 2 == 0
        client = RetryingClient(self._url, dialect, self._prompt, key, stream=stream)
        client.run()
        refused = [f"{client.refusals} times refused"] if client.refusals else []
        told = " ".join([f"{dialect} with a key", client.wrong, *refused])
        self._tally.count(told, None if refused else client.text, scripted(self._prompt, self._tokens))

    @property
    def _tokens(self) -> int:
        return int(self._prompt.rpartition("=")[2])

    def _ask_shortly(self, key: str) -> None:
        stream = self._number % 4 < 2
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
            text = joined_text(answer.text)
        self._tally.count(f"short, {answer.status_code}", text, scripted(SHORT, 5))


def end_gateways(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """Kill the gateway `kills` times, and reload it and the worker `reloads` times each, in any order."""
    dice, tally, over = random.Random(given.seed), Tally(), threading.Event()
    ends = given.kills * ["kill"] + given.reloads * ["reload", "reload of the worker"]
    dice.shuffle(ends)
    cut = Counter[str]()
    with serving(folder, STEP) as served:
        askers = [Asker(served.url, n, given.tokens, over, tally) for n in range(given.clients)]
        for asker in askers:
            asker.start()
        try:
            for end in ends:
                over.wait(dice.uniform(0.2, 0.2 + given.interval))
                before = tally.cut
                served.set_worker(f"{STEP} --drain-timeout {dice.choice((0, 10))}")
                tally.wrong += _end(served, end)
                cut[end] += tally.cut - before
        finally:
            over.set()
            for asker in askers:
                asker.join(2 * ANSWER_S_MAX)
        left = served.status()["gateway"]["in_flight"]
    waiting = sum(asker.is_alive() for asker in askers)
    print(f"{tally.answers} answers; cut by {dict(cut)}", flush=True)
    tally.wrong += [f"{end}: {n} short answers are cut" for end, n in cut.items() if n and end != "kill"]
    tally.wrong += [f"{waiting} clients are still waiting"] if waiting else []
    return tally.wrong + ([f"{left} requests are left"] if left else [])


def _end(served: Served, end: str) -> list[str]:
    """End the gateway or the worker, and wait until the next one serves."""
    before = served.gateway_pids()
    if end == "kill":
        os.kill(before[-1], signal.SIGKILL)
    else:
        done, text = served.reload(gateway=end == "reload")
        if not done:
            return [f"{end}: {text}"]
        if end == "reload of the worker":
            return []
    eventually(
        lambda: served.gateway_pids() != before and served.workers("ready"),
        within_s=RECOVERED_S_MAX,
        what="another gateway has its worker",
    )
    return []


if __name__ == "__main__":
    options: dict[str, Any] = {"--kills": 30, "--reloads": 30, "--clients": 16, "--tokens": 150}
    run_program(__doc__, end_gateways, options | {"--interval": 1.0, "--seed": 1})
