"""Kill the gateway, the worker, or both at random instants, while two batches are under way.

After each kill both batches must end with every request answered once, in order, with the text of the same
request without a kill. `python -m tests.faults.batch_kills` is the long run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.runner import run_program
from tests.system import System, eventually, running_system

CHAT = "/v1/chat/completions"
LINES = 8
MOMENT_S_MAX = 0.6
"""Latest instant of a kill after the batches were created; they take about this long."""
WITHIN_S = 60.0
VICTIMS = ("gateway", "worker", "both")


class Batches:
    """A system that is killed again and again, with the requests of its batches and their texts."""

    def __init__(self, system: System, seed: int) -> None:
        self.system = system
        self.dice = random.Random(seed)
        self.worker = system.start_worker()
        system.wait_ready()
        self.outcomes: Counter[str] = Counter()

    def run(self, kills: int) -> Counter[str]:
        """Run rounds with one kill each. Raises `AssertionError` for a lost, repeated or wrong answer."""
        for number in range(kills):
            victim = self.dice.choice(VICTIMS)
            bodies = [self._bodies(f"{number}{name}") for name in "ab"]
            ids = [self._create(each) for each in bodies]
            # The instant of the kill is the input of this test: nothing waits for its passing.
            time.sleep(self.dice.uniform(0, MOMENT_S_MAX))
            before = sum(self._batch(id)["request_counts"]["completed"] for id in ids)
            self._kill(victim)
            for id, each in zip(ids, bodies, strict=True):
                self._check(id, each)
            self.outcomes["kills"] += 1
            self.outcomes[victim] += 1
            self.outcomes["answered before the kill"] += before
            self.outcomes["requests"] += 2 * LINES
        return self.outcomes

    def _bodies(self, name: str) -> list[dict[str, Any]]:
        """Return requests of different lengths; some sample."""
        return [
            {
                "messages": [{"role": "user", "content": f"{name} {n} !slow=4 !tokens={self._tokens()}"}],
                "max_tokens": 100,
                "temperature": n % 2,
                "seed": n,
            }
            for n in range(LINES)
        ]

    def _tokens(self) -> int:
        return self.dice.randrange(4, 40)

    def _create(self, bodies: list[dict[str, Any]]) -> str:
        lines = [
            {"custom_id": str(n), "method": "POST", "url": CHAT, "body": body}
            for n, body in enumerate(bodies)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        http = self.system.http
        file = http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return str(http.post("/v1/batches", json=asked).json()["id"])

    def _batch(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.system.http.get(f"/v1/batches/{id}").json()
        return found

    def _kill(self, victim: str) -> None:
        if victim != "gateway":
            self.worker.kill()
            self.worker.wait()
        if victim != "worker":
            self.system.restart_gateway()
        if victim != "gateway":
            self.worker = self.system.start_worker()
        self.system.wait_ready()

    def _check(self, id: str, bodies: list[dict[str, Any]]) -> None:
        batch = eventually(
            lambda: found if (found := self._batch(id))["status"] == "completed" else None,
            within_s=WITHIN_S,
            what=f"{id} is completed",
        )
        assert batch is not None
        assert batch["error_file_id"] is None, batch
        content = self.system.http.get(f"/v1/files/{batch['output_file_id']}/content").text
        lines = [json.loads(line) for line in content.splitlines()]
        assert [line["custom_id"] for line in lines] == [str(n) for n in range(LINES)], "each once, in order"
        for line, body in zip(lines, bodies, strict=True):
            alone = self.system.http.post(CHAT, json=body).json()
            said, expected = (answer["choices"][0]["message"]["content"] for answer in (_body(line), alone))
            assert said == expected, f"line {line['custom_id']} of {id}: {said!r}, alone {expected!r}"


def _body(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = line["response"]["body"]
    return found


def run(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kill `kills` times in `folder`; return what happened, counted."""
    with running_system(folder, ["--batch-dir", str(folder / "batches")]) as system:
        return Batches(system, seed).run(kills)


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Make all kills in the folder. Raises `AssertionError` if a check fails."""
    outcomes = run(folder, given.kills, given.seed)
    print(", ".join(f"{name} {n}" for name, n in outcomes.items()))
    return []


if __name__ == "__main__":
    run_program(__doc__, check, {"--kills": 200, "--seed": 0})
