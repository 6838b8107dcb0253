"""Workers that are killed at random instants under streams: `python -m tests.faults.failover --kills 100`.

A gateway, one scripted worker at a time, and clients who ask again as soon as they have their answers,
streamed and whole, greedy and seeded, one choice and two. Every answer must be that of an undisturbed run.
Who comes while no worker is ready is refused, as ever, and asks again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from broker.dialects.parameters import derived_seed
from tests.faults.streams import Client, scripted
from tests.system import Process, System, chat_body, running_system

CLIENTS = 32
STEP_MS = 5
TOKENS_MAX = 150
UNDISTURBED_S_MAX = 2.0
"""How long, at most, a worker lives."""
REFUSED = {"worker_unavailable", "model_loading"}


@dataclass(slots=True)
class Outcome:
    """What became of it all. `wrong`: the first words of what went wrong."""

    kills: int = 0
    answers: int = 0
    refusals: int = 0
    pause_s_max: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    """A request and its answers."""

    body: dict[str, object]
    texts: list[str]
    tokens: int

    @classmethod
    def draw(cls, dice: random.Random) -> Question:
        tokens, choices = dice.randint(1, TOKENS_MAX), dice.choice([1, 1, 1, 2])
        text = " ".join(["word"] * dice.randint(1, 9) + [f"!tokens={tokens}"])
        fields: dict[str, object] = {"n": choices}
        if seeded := dice.random() < 0.5:
            fields |= {"temperature": 1.0, "seed": dice.randrange(2**40)}
        if dice.random() < 0.5:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        seed = int(str(fields.get("seed", 0)))
        seeds = [seed, *(derived_seed(seed, choice) for choice in range(1, choices))]
        texts = [scripted(text, tokens, each if seeded else 0) for each in seeds]
        return cls(chat_body(text, **fields), texts, choices * (tokens + 1))


class Asker(threading.Thread):
    """Asks, checks, and asks again until told that it is over."""

    def __init__(self, url: str, dice: random.Random, over: threading.Event) -> None:
        super().__init__()
        self._url, self._dice, self._over = url, dice, over
        self.outcome = Outcome()

    def run(self) -> None:
        while not self._over.is_set():
            question = Question.draw(self._dice)
            client = Client(self._url, question.body)
            client.run()
            self._judge(question, client)

    def _judge(self, question: Question, client: Client) -> None:
        outcome = self.outcome
        try:
            if client.status == 503 and client.error in REFUSED:
                outcome.refusals += 1
                self._over.wait(0.05)
                return
            assert client.texts == question.texts
            assert client.completion_tokens == question.tokens
            outcome.answers += 1
            outcome.pause_s_max = max(outcome.pause_s_max, client.pause_s)
        except Exception as error:
            outcome.wrong.append(f"{question.body}: {error!r}: {client.read[-200:]!r}")


def run(system: System, kills: int, seed: int, clients: int = CLIENTS) -> Outcome:
    """Kill so many workers under so many clients."""
    dice = random.Random(seed)
    over = threading.Event()
    worker = _start(system)
    askers = [Asker(system.url, random.Random(dice.random()), over) for _ in range(clients)]
    for asker in askers:
        asker.start()
    for _ in range(kills):
        time.sleep(dice.uniform(0, UNDISTURBED_S_MAX))
        worker.kill()
        worker.wait()
        worker = _start(system)
    over.set()
    total = Outcome(kills=kills)
    for asker in askers:
        asker.join()
        one = asker.outcome
        total.answers += one.answers
        total.refusals += one.refusals
        total.pause_s_max = max(total.pause_s_max, one.pause_s_max)
        total.wrong += one.wrong
    return total


def _start(system: System) -> Process:
    worker = system.start_worker("--step-ms", str(STEP_MS))
    system.wait_ready()
    return worker


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_system(Path(folder)) as system:
        outcome = run(system, given.kills, given.seed, given.clients)
    print(f"{outcome.kills} kills, {outcome.answers} answers, {outcome.refusals} refusals between workers")
    print(f"longest pause {outcome.pause_s_max:.2f} s, {len(outcome.wrong)} wrong")
    for wrong in outcome.wrong[:5]:
        print(wrong)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
