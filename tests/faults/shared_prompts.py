"""Kills and restarts under streams whose long prompts share prefixes.

    python -m tests.faults.shared_prompts --seed 1 --kills 70 --model hybrid

`roundhouse serve` runs with its default settings, which include a spare and a prefix cache on disk, in a new
folder. Concurrent streams have prompts above the minimum length for the disk, and most share prefixes
(`tests.faults.prompt_sets`). The worker, the spare or both are killed at random instants. Between kills the
server is restarted on its folder, often with a kill soon after. After each kill every stream must continue
and end with its reference answer. A stream without a new token for `--bound` seconds is hung. In the end no
process may be busy and no request in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from protocol.cache_folder import cache_folder
from recipes.smollm2.__main__ import make_folder
from tests.faults.full_server import FullServer, full_server
from tests.faults.prompt_sets import PromptTexts, ReferenceRequest, Sizes, draw_bodies, with_references
from tests.faults.runner import run_program
from tests.faults.stream_client import StreamResult, stream
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.system import eventually

Step = Literal["worker", "spare", "both", "restart", "prompts"]
"""The target of a kill, a restart of the server, or a new set of prompts."""
KILLS_BETWEEN_RESTARTS: tuple[Step, ...] = ("worker", "both", "worker", "spare", "both")
SET_KILLS = 10
"""Kills between new sets of prompts."""
STREAMS = 16
BOUND_S = 120.0
REFERENCE_S_MAX = 900.0
"""Timeout of an undisturbed answer, while upstream computes the reference on the same cores."""
ENDED_S_MAX = 1800.0
"""Timeout for all streams open at a kill; a stream without progress is reported much earlier."""
LIFE_S_MAX, RESTORE_S_MAX = 2.0, 0.5
"""Maximum delay of a kill after the end of the previous kill's streams, and after a restart."""
PAIR_SHARE = 0.25
"""Share of kills after a restart whose streams the next kill may hit again. A third kill must not hit them:
a request present at three crashes is quarantined."""
REFUSED = {"worker_unavailable", "model_loading"}
REFUSED_S = 0.25
IDLE_S, IDLE_SHARE_MAX = 10.0, 0.05
REUSED_TOKENS_MIN = 256
LOG_ERROR = re.compile(r"^.* error: .*$|^Traceback.*$|^.*stored prefix .* cannot be .*$", re.MULTILINE)
LOG_CHARACTERS = 20_000
"""Characters of the server's log that are printed when the lane itself fails."""
SIZES = {
    "dense": Sizes(),
    "sliding": Sizes(),
    "hybrid": Sizes(prompt_max=1400, answer_max=80, requests=16),
    "smollm2": Sizes(prompt_max=1000, shared=500, answer_max=40, requests=8),
}
SIZES_OF_FOLDER = Sizes(prompt_max=1300, answer_max=60, requests=10)


@dataclass(slots=True)
class Outcome:
    """Counts and failures of a run.

    `met`: streams open at a kill. `reused`: answers with a partly restored prompt. `pauses_s`: the pause of
    each stream at a kill of its worker. `idle`: each process's share of a core at the end. `log_errors`:
    error lines and tracebacks in the server's log.
    """

    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    answers: int = 0
    reused: int = 0
    refusals: int = 0
    met: int = 0
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    in_flight: int = 0
    log_errors: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        failed = [f"{count} failed: {code}" for code, count in self.errors.items()]
        busy = [f"{name} is busy" for name, share in self.idle.items() if share > IDLE_SHARE_MAX]
        left = [f"{self.in_flight} requests in flight"] if self.in_flight else []
        return [*self.hung, *self.wrong, *failed, *busy, *left, *self.log_errors]


class Gate:
    """A counter of open streams. While it is closed, no new stream begins."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = True
        self._last = 0
        self._open: set[int] = set()

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Wait until the gate is open, and count a stream for the duration of the context."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed, ENDED_S_MAX)
            self._last += 1
            number = self._last
            self._open.add(number)
        try:
            yield
        finally:
            with self._changed:
                self._open.discard(number)
                self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def close(self) -> None:
        """Prevent new streams, and wait until the open ones have ended."""
        with self._changed:
            self._closed = True
        self.wait_ended(self.opened())

    def opened(self) -> set[int]:
        with self._changed:
            return set(self._open)

    def wait_ended(self, streams: set[int]) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: not streams & self._open, ENDED_S_MAX)
        assert ended, f"streams have not ended within {ENDED_S_MAX} s"


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
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.outcome = Outcome()
        self._server, self._model, self._sizes = server, model, sizes
        self._bound_s, self._report = bound_s, report
        self._dice = random.Random(seed)
        self._texts = PromptTexts(model)
        self._requests: list[ReferenceRequest] = []
        self._gate, self._over, self._lock = Gate(), threading.Event(), threading.Lock()
        self._killed_at: list[float] = []
        self._clients = [
            threading.Thread(target=self._run_client, args=(random.Random(self._dice.random()),))
            for _ in range(streams)
        ]

    def run(self, steps: Sequence[Step], oracle: Oracle, idle_s: float = IDLE_S) -> Outcome:
        """Make all steps under streams, then wait until nothing is in flight.

        `idle_s`: duration of the final CPU measurement; 0: none.
        """
        self._draw_prompts(oracle)
        for client in self._clients:
            client.start()
        try:
            self._gate.open()
            for number, step in enumerate(steps):
                self._do(step, oracle, after=steps[number - 1] if number else "prompts")
                self._report(f"{number + 1}: {step}: {self._progress()}")
        finally:
            self._over.set()
            self._gate.open()
            for client in self._clients:
                client.join()
        self._wait_idle()
        if idle_s:
            self._server.wait_spare()  # until then the spare computes
            self.outcome.idle = self._server.cpu_shares(idle_s)
        self.outcome.log_errors = LOG_ERROR.findall(self._server.log())
        return self.outcome

    # --- steps ---

    def _do(self, step: Step, oracle: Oracle, after: Step) -> None:
        if step == "prompts":
            self._gate.close()
            self._draw_prompts(oracle)
            self._gate.open()
        elif step == "restart":
            self._gate.close()
            self._server.stop()
            self._server.start()
            self.outcome.restarts += 1
            self._gate.open()
        else:
            self._kill(step, after)

    def _kill(self, step: Step, after: Step) -> None:
        worker = self._server.wait_ready()
        spare = self._server.wait_spare() if step != "worker" else 0
        time.sleep(self._dice.uniform(0, RESTORE_S_MAX if after == "restart" else LIFE_S_MAX))
        met = self._gate.opened()
        if step != "spare":
            with self._lock:
                self._killed_at.append(time.monotonic())
        for pid in {"worker": [worker], "spare": [spare], "both": [spare, worker]}[step]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.outcome.kills[step] += 1
        self.outcome.met += len(met)
        if self._dice.random() < PAIR_SHARE and after == "restart":
            return
        self._gate.wait_ended(met)

    def _draw_prompts(self, oracle: Oracle) -> None:
        drawn = draw_bodies(self._texts, self._sizes, self._dice)
        self._requests = with_references(self._model, oracle, drawn, self._ask_undisturbed)

    def _ask_undisturbed(self, path: str, body: dict[str, Any]) -> str:
        self._server.wait_ready()
        result = stream(self._server.url + path, body, REFERENCE_S_MAX)
        assert result.finish_reason == "length", f"no undisturbed answer: {result}"
        return result.text

    # --- clients ---

    def _run_client(self, dice: random.Random) -> None:
        while not self._over.is_set():
            with self._gate.stream():
                request = dice.choice(self._requests)
                try:
                    url = self._server.url + request.path
                    result = stream(url, request.body, self._bound_s, self._request_status)
                except Exception as error:  # any error fails the run
                    result = StreamResult(error=repr(error))
            with self._lock:
                self._judge(request, result)
            if result.error in REFUSED:
                time.sleep(REFUSED_S)

    def _request_status(self, id: str) -> str:
        """Return the server's status of a request, or of all without a token if `id` is empty."""
        rows = self._server.status()["requests"]
        return str([row for row in rows if row["id"] == id or (not id and not row["answered"])])

    def _judge(self, request: ReferenceRequest, result: StreamResult) -> None:
        outcome = self.outcome
        if result.hung is not None:
            outcome.hung.append(f"no token within {self._bound_s:g} s: {result.id} {result.hung}")
            self._report(f"hung: {outcome.hung[-1]}")
        elif result.status == 503 and result.error in REFUSED:
            outcome.refusals += 1
        elif result.error is not None:
            outcome.errors[result.error] += 1
            self._report(f"failed: {result.error} of {result.id} after {len(result.text)} characters")
        elif (result.text, result.usage.get("completion_tokens")) != (request.text, request.tokens):
            outcome.wrong.append(_difference(request, result))
            self._report(f"wrong: {outcome.wrong[-1]}")
        else:
            outcome.answers += 1
            outcome.reused += result.cached_tokens >= REUSED_TOKENS_MIN
            hit = [end - at for at, end in result.pauses if any(at <= k <= end for k in self._killed_at)]
            outcome.pauses_s += [max(hit)] if hit else []

    # --- the end ---

    def _wait_idle(self) -> None:
        self._server.wait_ready()
        with contextlib.suppress(AssertionError):  # remaining requests are reported
            eventually(lambda: not self._in_flight(), within_s=self._bound_s, what="nothing is in flight")
        self.outcome.in_flight = self._in_flight()

    def _in_flight(self) -> int:
        status = self._server.status()
        rows = sum(len(worker["rows"]) for worker in status["workers"])
        return max(int(status["gateway"]["in_flight"]), rows)

    def _progress(self) -> str:
        outcome = self.outcome
        failed = (
            f"{len(outcome.hung)} hung, {len(outcome.wrong)} wrong, {sum(outcome.errors.values())} failed"
        )
        return f"{outcome.answers} answers, {failed}"


def _difference(request: ReferenceRequest, result: StreamResult) -> str:
    """Describe where an answer differs from its reference."""
    pairs = zip(request.text, result.text, strict=False)
    at = next((n for n, (ours, right) in enumerate(pairs) if ours != right), len(result.text))
    kind = "seeded" if request.body["temperature"] else "greedy"
    ours, reference = (text[max(0, at - 30) : at + 30] for text in (result.text, request.text))
    return (
        f"{result.id}, {kind}, {request.path}, {result.cached_tokens} tokens restored, differs at character"
        f" {at} of {len(request.text)}: {ours!r} instead of {reference!r}"
    )


def draw_steps(dice: random.Random, kills: int) -> list[Step]:
    """Return `kills` kills of all kinds, with restarts and new prompts between them."""
    steps: list[Step] = []
    done = 0
    while done < kills:
        group = list(KILLS_BETWEEN_RESTARTS)
        dice.shuffle(group)
        steps += ["restart", *group[: kills - done]]
        done += len(group)
        if done % SET_KILLS == 0 and done < kills:
            steps.append("prompts")
    return steps


def print_report(outcome: Outcome) -> None:
    print(
        f"kills {dict(outcome.kills)}, {outcome.restarts} restarts, {outcome.met} streams open at the kills"
    )
    print(f"{outcome.answers} answers, {outcome.reused} with a restored prefix, {outcome.refusals} refusals")
    if pauses := outcome.pauses_s:
        print(f"{len(pauses)} pauses: median {statistics.median(pauses):.2f} s, at most {max(pauses):.2f} s")


def folder_of(model: str) -> Path:
    """Return the folder of a test model, of `smollm2` (created if missing), or of another model."""
    if model != "smollm2":
        return model_folder(model) if model in SIZES else Path(model).resolve()
    folder = cache_folder(os.environ, sys.platform) / "smollm2" / "float32"
    if not folder.exists():
        make_folder(folder)
    return folder


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run all steps with a new server. The measurements are printed even if the run fails."""
    model = folder_of(given.model)
    sizes = SIZES.get(given.model, SIZES_OF_FOLDER)
    steps = draw_steps(random.Random(given.seed), given.kills)
    with Oracle() as oracle, full_server(folder, model) as server:
        soak = Soak(
            server,
            model,
            sizes,
            given.seed,
            streams=given.streams,
            bound_s=given.bound,
            report=lambda line: print(time.strftime("%X"), line, flush=True),
        )
        try:
            return soak.run(steps, oracle, given.idle).failures
        except BaseException:
            print(server.log()[-LOG_CHARACTERS:])
            raise
        finally:
            print_report(soak.outcome)


if __name__ == "__main__":
    options = {
        "--seed": 0,
        "--kills": 10,
        "--model": {"default": "dense", "help": f"{', '.join(SIZES)}, or a folder"},
        "--streams": STREAMS,
        "--bound": {"type": float, "default": BOUND_S, "metavar": "SECONDS"},
        "--idle": {"type": float, "default": IDLE_S, "metavar": "SECONDS"},
    }
    run_program(__doc__, check, options)
