"""Kills and restarts under streams whose long prompts share prefixes.

    python -m tests.faults.shared_prompts --seed 1 --kills 70 --model hybrid
    python -m tests.faults.shared_prompts --model smollm2 --brief

`roundhouse serve` runs with its default settings, which include a spare and a prefix cache on disk, in a new
folder. In each round concurrent streams begin, with prompts above the minimum length for the disk, most of
which share prefixes (`tests.faults.prompt_sets`), and the worker, the spare or both are killed at a random
instant. Between rounds the server is restarted on its folder. Every stream must continue and end with its
reference answer within `--bound` seconds. In the end no request may be in flight.

`--brief`: instead a few short greedy requests with speculative decoding, in some minutes without a fast BLAS:
one by one, together, with drafts of their own answers, restored, and under one kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recipes.smollm2.__main__ import make_folder
from tests.faults.prompt_sets import PromptTexts, ReferenceRequest, Sizes, with_references
from tests.faults.runner import run_program
from tests.faults.several import FullServer, full_server
from tests.faults.streams import Client, wait_until_taken
from tests.models.fixtures import model_folder
from tests.oracle import Oracle, StoredOracle
from tests.system import eventually

ROOT = Path(__file__).resolve().parents[2]
Step = Literal["worker", "spare", "both", "restart", "prompts", "alone", "together", "drafts"]
"""The target of a kill, a restart of the server, a new set of prompts, or requests without a kill: one by
one, all at once, or so with their answers as predictions."""
KILLS_BETWEEN_RESTARTS: tuple[Step, ...] = ("worker", "both", "worker", "spare", "both")
SET_KILLS = 10
"""Kills between new sets of prompts."""
STREAMS = 16
BOUND_S = 900.0
"""Also for an undisturbed answer, while upstream computes the reference on the same cores."""
LIFE_S_MAX = 4.0
AGAIN_SHARE = 0.25
"""Share of rounds in which the next worker is killed too, under the same streams. A third kill must not hit
them: a request without progress fails at the third crash."""
REUSED_TOKENS_MIN = 256
LOG_ERROR = re.compile(r"^.* error: .*$|^Traceback.*$|^.*stored prefix .* cannot be .*$", re.MULTILINE)
LOG_CHARACTERS = 20_000
"""Characters of the server's log that are printed when the program itself fails."""
SIZES = {
    "dense": Sizes(),
    "sliding": Sizes(),
    "hybrid": Sizes(prompt_max=1400, answer_max=80, requests=16),
    "smollm2": Sizes(prompt_max=1000, shared=500, answer_max=40, requests=8),
}
SIZES_OF_FOLDER = Sizes(prompt_max=1300, answer_max=60, requests=10)
BRIEF_SIZES = Sizes(prompt_min=200, prompt_max=250, shared=150, answer_max=20, requests=6, greedy=1.0)
BRIEF_STEPS: tuple[Step, ...] = ("alone", "together", "drafts", "worker", "alone")


@dataclass(slots=True)
class Outcome:
    """The results of a run. `reused`: answers with a restored prefix. `met`: streams open at a kill.
    `accepted`: accepted draft tokens of predictions."""

    kills: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    reused: int = 0
    met: int = 0
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    """Concurrent clients of a server whose processes are killed."""

    def __init__(
        self,
        server: FullServer,
        model: Path,
        sizes: Sizes,
        seed: int,
        *,
        streams: int = STREAMS,
        bound_s: float = BOUND_S,
        life_s: float = LIFE_S_MAX,
    ) -> None:
        """`life_s`: the maximum time from the begin of the streams to the kill."""
        self.outcome = Outcome()
        self._server, self._model = server, model
        self._streams, self._bound_s, self._life_s = streams, bound_s, life_s
        self._dice = random.Random(seed)
        self._texts = PromptTexts(model, sizes, self._dice)
        self._reused_min = min(REUSED_TOKENS_MIN, sizes.shared // 2)
        self._requests: list[ReferenceRequest] = []

    def run(self, steps: Sequence[Step], oracle: Oracle) -> Outcome:
        """Make all steps, then wait until nothing is in flight."""
        for number, step in enumerate(("prompts", *steps)):
            if step == "prompts":
                drawn = self._texts.draw_bodies()
                self._requests = with_references(self._model, oracle, drawn, self._ask_undisturbed)
            elif step == "restart":
                self._server.process.stop()
                self._server.begin()
            elif step in ("alone", "together", "drafts"):
                self._ask(step)
            else:
                self._kill_under_streams(step)
            outcome = self.outcome
            told = f"{outcome.answers} answers, {outcome.reused} with a restored prefix, {outcome.met} met"
            told += f", {outcome.accepted} tokens of predictions accepted, {len(outcome.wrong)} wrong"
            print(f"{number}: {step}: {told}", flush=True)
        self._server.wait_ready()
        with contextlib.suppress(AssertionError):  # what is left is reported
            eventually(lambda: not self._in_flight(), within_s=self._bound_s, what="nothing is in flight")
        outcome.wrong += [f"{n} requests in flight" for n in [self._in_flight()] if n]
        outcome.wrong += LOG_ERROR.findall(self._server.process.log())
        return outcome

    def _ask_undisturbed(self, path: str, body: dict[str, Any]) -> str:
        self._server.wait_ready()
        client = Client(self._server.url, body, path, self._bound_s)
        client.run()
        assert client.reasons == ["length"]
        return client.texts[0]

    def _ask(self, step: Step) -> None:
        """Send all requests, and judge their answers."""
        self._server.wait_ready()
        clients = [self._client(request, predicts=step == "drafts") for request in self._requests]
        for client in clients:
            client.start()
            if step == "alone":
                client.join()
        for request, client in zip(self._requests, clients, strict=True):
            client.join()
            self._judge(request, client)

    def _client(self, request: ReferenceRequest, *, predicts: bool = False) -> Client:
        body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
        if predicts and "messages" in body:
            body |= {"prediction": {"type": "content", "content": request.text}}
        return Client(self._server.url, body, request.path, self._bound_s)

    def _kill_under_streams(self, step: Step) -> None:
        self._server.wait_ready()
        self._server.wait_spare()
        asked = [self._dice.choice(self._requests) for _ in range(self._streams)]
        clients = [self._client(request) for request in asked]
        for client in clients:
            client.start()
        wait_until_taken(self._server.url, clients)
        again: list[Step] = ["worker"] if self._dice.random() < AGAIN_SHARE else []
        for victims in (step, *again):
            worker, spare = self._server.wait_ready(), self._server.spare()
            time.sleep(self._dice.uniform(0, self._life_s))
            self.outcome.met += sum(client.is_alive() for client in clients)
            for name, pid in (("spare", spare), ("worker", worker)):
                if pid is not None and victims in (name, "both"):
                    os.kill(pid, signal.SIGKILL)
            if victims != "spare":
                self._wait_gone(worker)
            self.outcome.kills[victims] += 1
        for request, client in zip(asked, clients, strict=True):
            client.join()
            self._judge(request, client)

    def _wait_gone(self, worker: int) -> None:
        """Wait until the gateway no longer calls a dead worker ready."""
        eventually(
            lambda: worker not in self._server.workers("ready"), within_s=self._bound_s, what="it is gone"
        )

    def _judge(self, request: ReferenceRequest, client: Client) -> None:
        outcome = self.outcome
        try:
            assert client.texts == [request.text]
            assert client.completion_tokens == request.tokens
            outcome.answers += 1
            outcome.reused += client.cached_tokens >= self._reused_min
            outcome.accepted += client.accepted_tokens
        except Exception as error:
            kind = f"{'seeded' if request.body['temperature'] else 'greedy'}, {request.path}"
            outcome.wrong.append(f"{kind}: {error!r}: {client.read[-300:]!r} instead of {request.text!r}")

    def _in_flight(self) -> int:
        status = self._server.status()
        rows = sum(len(worker["rows"]) for worker in status["workers"])
        return max(int(status["gateway"]["in_flight"]), rows)


def draw_steps(dice: random.Random, kills: int) -> list[Step]:
    """Return `kills` kills of all kinds, with restarts and new prompts between them."""
    steps: list[Step] = []
    for done in range(0, kills, len(KILLS_BETWEEN_RESTARTS)):
        group = dice.sample(KILLS_BETWEEN_RESTARTS, len(KILLS_BETWEEN_RESTARTS))
        steps += ["prompts"] if done and done % SET_KILLS == 0 else []
        steps += ["restart", *group[: kills - done]]
    return steps


def folder_of(model: str) -> Path:
    """Return the folder of a test model, of `smollm2` (created if missing), or of another model."""
    if model != "smollm2":
        return model_folder(model) if model in SIZES else Path(model).resolve()
    folder = ROOT / ".venv" / "models" / model
    if not folder.exists():
        make_folder(folder)
    return folder


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run all steps with a new server."""
    model = folder_of(given.model)
    sizes = BRIEF_SIZES if given.brief else SIZES.get(given.model, SIZES_OF_FOLDER)
    steps = BRIEF_STEPS if given.brief else draw_steps(random.Random(given.seed), given.kills)
    streams = sizes.requests if given.brief else given.streams
    flags = [*(["--speculation=auto"] if given.brief else []), *(["--exact"] if given.exact else [])]
    oracles = StoredOracle() if given.brief else Oracle()
    with oracles as oracle, full_server(folder, model, flags) as server:
        soak = Soak(server, model, sizes, given.seed, streams=streams, bound_s=given.bound)
        try:
            outcome = soak.run(steps, oracle)
        except BaseException:
            print(server.process.log()[-LOG_CHARACTERS:])
            raise
    print(f"kills {dict(outcome.kills)}")
    if given.brief and not (outcome.reused and outcome.met):
        outcome.wrong.append("no prefix was restored, or the kill met no stream")
    if given.brief and not outcome.accepted:
        print("no drafts: they do not pay on this machine; see tests.worker.zoo --architecture smollm2")
    return outcome.wrong


if __name__ == "__main__":
    options = {
        "--seed": 0,
        "--kills": 10,
        "--model": {"default": "dense", "help": f"{', '.join(SIZES)}, or a folder"},
        "--streams": STREAMS,
        "--brief": {"action": "store_true", "help": "a few short requests, with drafts"},
        "--exact": {"action": "store_true", "help": "only passes that give what one row gives alone"},
        "--bound": {"type": float, "default": BOUND_S, "metavar": "SECONDS"},
    }
    run_program(__doc__, check, options)
