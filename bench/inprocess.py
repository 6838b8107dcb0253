"""Our engine in a process of its own, without gateway and socket: the difference is what serving costs.

Asked over pipes, a JSON line for a JSON line. The texts become prompts before the clock starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.timing import Work, timed
from worker.preload import preload_openblas

STOP_S_MAX = 20.0


class InProcess:
    """The asking end."""

    def __init__(self, pipe: subprocess.Popen[str]) -> None:
        self._pipe = pipe

    @property
    def process(self) -> psutil.Process:
        """For what it costs."""
        return psutil.Process(self._pipe.pid)

    def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int, seed: int | None) -> Work:
        """As `bench.client.burst`: all `texts`, so many rows at once."""
        question = {"texts": list(texts), "rows": concurrency, "max_tokens": max_tokens, "seed": seed}
        assert self._pipe.stdin is not None
        assert self._pipe.stdout is not None
        self._pipe.stdin.write(json.dumps(question) + "\n")
        self._pipe.stdin.flush()
        answer = self._pipe.stdout.readline()
        if not answer:
            raise RuntimeError("the engine's process has ended")
        return Work(**json.loads(answer))


@contextmanager
def in_process(folder: Path) -> Iterator[InProcess]:
    """The engine's process for as long as the context is open."""
    command = [sys.executable, "-m", "bench.inprocess", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pipe:
        yield InProcess(pipe)
        assert pipe.stdin is not None
        pipe.stdin.close()
        try:
            pipe.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pipe.kill()


def _answer(ours: Any, preparer: Any, question: dict[str, Any]) -> Work:
    from protocol.conversation import pack
    from protocol.messages import Generate
    from protocol.parts import Sampling

    prepared = []
    for number, text in enumerate(question["texts"]):
        generate = Generate(
            incarnation="bench",
            id=str(number),
            sampling=Sampling(seed=question["seed"] or 0, temperature=0.0),
            messages=pack([{"role": "user", "content": text}]),
            max_tokens=question["max_tokens"],
            ignore_eos=True,
        )
        prepared.append(preparer.prepare(generate, ()))

    def work() -> int:
        ours.submit_prepared(prepared, question["rows"])
        tokens: int = ours.run(sum(request.max_tokens for request in prepared))
        return tokens

    return timed(work)


def main() -> None:
    preload_openblas(sys.argv)
    from bench.ours import Ours, load

    model = load(Path(sys.argv[1]))
    preparer = model.open_preparer(model.facts.context_length)
    # Kept from burst to burst, as a server keeps its own: what it has learned of the model's pace is in it.
    sides: dict[int, Ours] = {}
    for line in sys.stdin:
        question = json.loads(line)
        rows = question["rows"]
        if rows not in sides:
            # A server drafts only where it is asked to.
            sides[rows] = Ours(model, rows, drafting=False)
        work = _answer(sides[rows], preparer, question)
        print(json.dumps({"amount": work.amount, "seconds": work.seconds}), flush=True)


if __name__ == "__main__":
    main()
