"""`python -m tests.faults.power_failures`: kill -9 of all processes, on disks that froze earlier.

Responses in the background and two batches, one of each API, are under way at the kills. No response whose
creation was answered may be lost or have another text (but those answered without the disk, after
`DISK_S_MAX`), the events of those that a client follows have no gap, and each request of a batch is in its
results once, in order, with the text that it has alone. `--victims`: in turn, all processes, or one that the
supervisor starts again; `reload`: the gateway is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from broker.answers.answer import DISK_S_MAX
from broker.api.batches.records import BatchRecord, Dialect
from broker.api.batches.store import DATABASE_NAME
from protocol.common.state_folder import JOURNAL_NAME
from tests.faults.event_follower import EventFollower
from tests.faults.frozen_disk import FrozenDisk
from tests.faults.runner import run_program
from tests.faults.several import Served, serving
from tests.faults.streams import scripted
from tests.system import eventually

WORKER = "--step-ms 5 --max-running 8"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CREATORS = 8
TOKENS_MAX = 100
END_S_MAX = 180.0
VICTIMS = ("everything", "gateway", "worker", "reload")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the prompt, and the length of its text. `samples`: with a seed."""

    prompt: str
    tokens: int
    samples: bool = False

    @classmethod
    def roll(cls, dice: random.Random, *, samples: bool = False) -> Asked:
        tokens = dice.randrange(4, TOKENS_MAX)
        return cls(f"{'go ' * dice.randrange(1, 9)}!tokens={tokens}", tokens, samples)

    def text(self, seed: int) -> str:
        """Return the undisturbed answer."""
        return scripted(self.prompt, self.tokens, seed if self.samples else 0)

    def chat(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages, "max_tokens": 200, "temperature": int(self.samples)}


class Failures:
    """A server that is killed again and again, with what its clients were told. `wrong`: what is not so."""

    def __init__(self, served: Served, folder: Path, given: argparse.Namespace) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._served, self._given = served, given
        self._dice = random.Random(given.seed)
        self._stored = folder / "batches" / DATABASE_NAME
        self.disk = FrozenDisk([folder / "durable" / JOURNAL_NAME, self._stored], self._dice)
        self._responses: dict[str, tuple[Asked, int]] = {}
        self._under_way: set[str] = set()
        self._batches: dict[str, tuple[Dialect, list[Asked]]] = {}
        self._lock = threading.Lock()
        self._serving = threading.Event()
        self._serving.set()
        self._followers: list[EventFollower] = []

    def run(self) -> None:
        """Make all kills, and check everything."""
        victims = self._given.victims.split(",")
        for number in range(self._given.kills):
            self._create_batches()
            self._disturb(victims[number % len(victims)])
            self._look()
        for id in list(self._batches):
            eventually(partial(self._is_checked, id), within_s=END_S_MAX, what=f"{id} is over")
        for id, (asked, seed) in self._responses.items():
            self._check_response(id, asked, seed)
        for follower in self._followers:
            self._check_events(follower)
        self.outcomes["responses"] = len(self._responses)

    # --- a kill ---

    def _disturb(self, victim: str) -> None:
        """Ask for responses until the victim is killed, and wait until it is there again."""
        wait_s, began = self._dice.uniform(0, self._given.interval), time.monotonic()
        count = max(1, self._dice.randint(1, self._given.responses) - len(self._under_way))
        instants = sorted(began + self._dice.uniform(0, wait_s) for _ in range(count))
        with ThreadPoolExecutor(CREATORS) as pool:
            for number, instant in enumerate(instants):
                _sleep_until(instant)
                asked = Asked.roll(self._dice, samples=number % 2 > 0)
                pool.submit(self._create_response, asked, number)
            _sleep_until(began + wait_s)
            with self._lock:
                self._serving.clear()
            self._kill(victim)
        if victim == "everything":
            if self._dice.random() < self._given.frozen:
                self.disk.freeze()
            self._served.begin()
        self._served.wait_ready()
        self._serving.set()
        self.outcomes[victim] += 1

    def _kill(self, victim: str) -> None:
        if victim == "everything":
            self._served.kill()
        elif victim == "gateway":
            os.kill(self._served.gateway_pids()[-1], signal.SIGKILL)
        elif victim == "reload":
            self.wrong += [] if self._served.reload(gateway=True)[0] else ["a reload has failed"]
        else:
            for pid in self._served.workers("ready"):
                os.kill(pid, signal.SIGKILL)

    def _look(self) -> None:
        """Count what was under way at the kill, and check what has ended."""
        journal = self._served.status()["durable"]["journal"]
        if journal["problem"] or journal["started_over"]:
            self.wrong.append(f"the journal: {journal}")
        self._under_way = {id for id in self._under_way if self._is_under_way(id)}
        batches = [id for id in list(self._batches) if not self._is_checked(id)]
        self.outcomes["responses under way"] += len(self._under_way)
        self.outcomes["batches under way"] += len(batches)

    # --- responses ---

    def _create_response(self, asked: Asked, seed: int) -> None:
        body = {"model": "fake", "input": asked.prompt, "background": True}
        body |= {"temperature": int(asked.samples), "seed": seed}
        began = time.monotonic()
        try:
            answer = self._served.http.post("/v1/responses", json=body) if self._serving.is_set() else None
        except httpx.TransportError:
            answer = None
        with self._lock:
            if answer is None or answer.status_code != 200:
                self.outcomes["responses not created"] += 1
            elif time.monotonic() - began >= DISK_S_MAX:
                self.outcomes["responses created without the disk"] += 1
            else:
                self.disk.note()
                id = answer.json()["id"]
                self._responses[id] = asked, seed
                self._under_way.add(id)
                if self._serving.is_set() and not any(each.is_alive() for each in self._followers):
                    self._follow(id)

    def _follow(self, id: str) -> None:
        follower = EventFollower(self._served.url, id, self._serving, self._lock, self.disk.note)
        self._followers.append(follower)
        follower.start()

    def _check_events(self, follower: EventFollower) -> None:
        follower.join(END_S_MAX)
        asked, seed = self._responses[follower.id]
        self.outcomes["responses followed"] += 1
        if follower.wrong or not follower.is_complete:
            self.wrong.append(f"the events of {follower.id}: {follower.wrong or 'no end'}")
        elif follower.text != asked.text(seed):
            self.wrong.append(f"the events of {follower.id} have another text: {follower.text!r:.200}")

    def _is_under_way(self, id: str) -> bool:
        return bool(self._response(id).get("status") in ("queued", "in_progress"))

    def _response(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._served.http.get(f"/v1/responses/{id}").json()
        return found

    def _check_response(self, id: str, asked: Asked, seed: int) -> None:
        eventually(lambda: not self._is_under_way(id), within_s=END_S_MAX, what=f"{id} is over")
        document = self._response(id)
        if document.get("status") != "completed":
            self.wrong.append(f"{id} is lost or not completed: {document!r:.300}")
        elif (text := document["output"][0]["content"][0]["text"]) != asked.text(seed):
            self.wrong.append(f"{id} has another text: {text!r:.200}")

    # --- batches ---

    def _create_batches(self) -> None:
        """Create what there is not: one batch of each API."""
        creations: dict[Dialect, Callable[[list[Asked]], str]] = {
            "openai": self._create_openai,
            "anthropic": self._create_anthropic,
        }
        known = {dialect for dialect, _ in self._batches.values()}
        for dialect in creations.keys() - known:
            lines = [Asked.roll(self._dice, samples=n % 2 > 0) for n in range(self._given.lines)]
            self._batches[creations[dialect](lines)] = dialect, lines
            with self._lock:
                self.disk.note()

    def _create_openai(self, lines: list[Asked]) -> str:
        rows = [
            {"custom_id": str(n), "method": "POST", "url": CHAT, "body": asked.chat()}
            for n, asked in enumerate(lines)
        ]
        content, http = "\n".join(map(json.dumps, rows)).encode(), self._served.http
        file = http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return str(http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def _create_anthropic(self, lines: list[Asked]) -> str:
        rows = [{"custom_id": str(n), "params": asked.chat()} for n, asked in enumerate(lines)]
        answer = self._served.http.post(f"{MESSAGES}/batches", json={"requests": rows})
        return str(answer.raise_for_status().json()["id"])

    def _is_checked(self, id: str) -> bool:
        """Check a batch if it is over; return whether it is."""
        dialect, lines = self._batches[id]
        http, is_openai = self._served.http, dialect == "openai"
        batch = http.get(f"/v1/batches/{id}" if is_openai else f"{MESSAGES}/batches/{id}").json()
        if batch.get("status" if is_openai else "processing_status") not in ("completed", "ended"):
            if "id" in batch:
                return False
            self.wrong.append(f"{id} is lost: {batch}")
            results = ""
        else:
            path = f"/v1/files/{batch['output_file_id']}/content" if is_openai else batch["results_url"]
            results = http.get(path).text
        del self._batches[id]
        self.outcomes["batches"] += 1
        self._check_results(id, lines, [json.loads(line) for line in results.splitlines()])
        return True

    def _check_results(self, id: str, lines: list[Asked], results: Sequence[dict[str, Any]]) -> None:
        ids = [int(result["custom_id"]) for result in results]
        self.outcomes["lines"] += len(lines)
        self.outcomes["lost"] += len(lines) - len(set(ids))
        self.outcomes["twice"] += len(ids) - len(set(ids))
        if ids != list(range(len(lines))):
            self.wrong.append(f"{id} has the results of {ids}")
        with closing(sqlite3.connect(f"{self._stored.as_uri()}?mode=ro", uri=True)) as database:
            [row] = database.execute("SELECT record FROM batches WHERE id = ?", (id,)).fetchall()
        record = msgspec.json.decode(row[0], type=BatchRecord)
        for number, result in zip(ids, results, strict=True):
            expected = lines[number].text(record.seed_of(number + 1))
            if _text(result) != expected:
                self.wrong.append(f"line {number} of {id} has another text: {result!r:.300}")


def _sleep_until(instant: float) -> None:
    """Let time pass: instants are the input of this program, nothing is waited for."""
    time.sleep(max(0.0, instant - time.monotonic()))


def _text(result: dict[str, Any]) -> str | None:
    """Return the text of a result of either API; None if it is an error."""
    if (response := result.get("response")) is not None:
        choices = response["body"].get("choices")
        return str(choices[0]["message"]["content"]) if choices else None
    message = result.get("result", {}).get("message")
    return str(message["content"][0]["text"]) if message else None


def check(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """Make all kills in the folder; print what happened, and return what is wrong."""
    flags = f"--batch-dir {folder}/batches --journal-max 1G --responses-max 100000"
    with serving(folder, WORKER, gateway_flags=flags) as served:
        failures = Failures(served, folder, given)
        failures.run()
    outcomes = failures.outcomes | failures.disk.outcomes
    print(", ".join(f"{name} {n}" for name, n in outcomes.items()))
    print(f"lost {outcomes['lost']}, twice {outcomes['twice']}", flush=True)
    return failures.wrong


if __name__ == "__main__":
    options: dict[str, Any] = {
        "--kills": 200,
        "--responses": {"type": int, "default": 24, "help": "most that are under way"},
        "--lines": {"type": int, "default": 40, "help": "of each batch"},
        "--interval": 2.5,
        "--frozen": {"type": float, "default": 0.7, "help": "share of the kills after which logs are cut"},
        "--victims": ",".join(VICTIMS),
        "--seed": 1,
    }
    run_program(__doc__, check, options)
