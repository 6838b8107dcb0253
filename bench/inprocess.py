"""Our engine in a separate process, without gateway and socket; the difference is the cost of serving.

Requests and answers are JSON lines over pipes. Prompts are tokenized before the clock starts.
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
from worker.process.preload import preload_openblas

STOP_S_MAX = 20.0


class InProcess:
    """The client's end of the pipes."""

    def __init__(self, pipe: subprocess.Popen[str]) -> None:
        self._pipe = pipe

    @property
    def process(self) -> psutil.Process:
        """The engine's process, for measuring its cost."""
        return psutil.Process(self._pipe.pid)

    def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int, seed: int | None) -> Work:
        """Run all `texts` with `concurrency` rows at once, as `bench.client.burst` does."""
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
    """Run the engine's process while the context is open."""
    command = [sys.executable, "-m", "bench.inprocess", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as pipe:
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
    from protocol.types import Sampling

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
    preparer = model.open_preparer(model.info.context_length)
    # Reused between bursts, as in a server, because it contains the measured speed of the model.
    sides: dict[int, Ours] = {}
    for line in sys.stdin:
        question = json.loads(line)
        rows = question["rows"]
        if rows not in sides:
            # A server speculates only if configured to.
            sides[rows] = Ours(model, rows, drafting=False)
        work = _answer(sides[rows], preparer, question)
        print(json.dumps({"amount": work.amount, "seconds": work.seconds}), flush=True)


if __name__ == "__main__":
    main()
