"""`make bench BENCH=replay`: what it costs a worker to keep its messages for the next gateway.

Each step's `StepOutputs` is encoded for the socket, as ever, and noted (`worker/gateway/replay.py`). The
ratio of the two is that of CPU time on the worker's I/O thread. Rounds take turns; medians. No model runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from protocol import wire
from protocol.messages import StepOutputs
from protocol.types import Delta
from worker.gateway.replay import REPLAY_S, Replay

STEP_S = 0.02
ROUNDS = 15


def steps_of(rows: int, count: int) -> list[StepOutputs]:
    """Return the messages of `count` steps of `rows` rows, with one token each."""
    return [
        StepOutputs(
            incarnation="w" * 16,
            deltas=[
                Delta(id=f"chatcmpl-{row:032}", sequence=at, tokens=[at], text=" word") for row in range(rows)
            ],
        )
        for at in range(count)
    ]


def encode_all(steps: Sequence[StepOutputs]) -> None:
    for message in steps:
        wire.encode(message)


def note_all(steps: Sequence[StepOutputs]) -> None:
    replay = Replay()
    for delta in steps[0].deltas:
        replay.open(delta.id)
    for at, message in enumerate(steps):
        now = at * STEP_S
        replay.note(message, now)
        replay.trim(now - REPLAY_S)


def seconds(work: Callable[[Sequence[StepOutputs]], None], steps: Sequence[StepOutputs]) -> float:
    began = time.process_time()
    work(steps)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    count = parser.parse_args().steps
    print("rows   encode µs/step   note µs/step   note/encode   note/step of 20 ms")
    for rows in (1, 16, 64):
        steps = steps_of(rows, count)
        rounds = [(seconds(encode_all, steps), seconds(note_all, steps)) for _ in range(ROUNDS)]
        encoding, noting = (statistics.median(each) / count for each in zip(*rounds, strict=True))
        shares = f"{noting / encoding:11.2f}   {noting / STEP_S:.5%}"
        print(f"{rows:4}   {1e6 * encoding:14.2f}   {1e6 * noting:12.2f}   {shares}")


if __name__ == "__main__":
    main()
