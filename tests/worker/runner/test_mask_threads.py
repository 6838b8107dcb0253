"""Jobs shared among threads: each runs once, and further threads help only with slow jobs."""

from __future__ import annotations

import threading

from worker.runner.sampling import grammar_masks
from worker.runner.sampling.grammar_masks import MaskThreads

WAIT_S_MAX = 20.0


def test_jobs_behind_a_long_one_are_done_at_the_same_time_and_each_once() -> None:
    long = threading.Event()
    meeting = threading.Barrier(3)  # no thread leaves until three have entered
    done: list[int] = []
    lock = threading.Lock()

    def meet(number: int) -> None:
        meeting.wait(WAIT_S_MAX)
        with lock:
            done.append(number)

    jobs = [lambda: long.wait(10 * grammar_masks.ALONE_S_MAX) and None]
    jobs += [lambda number=number: meet(number) for number in range(9)]
    shared = MaskThreads(3)
    for _ in range(5):
        shared.run(jobs)
        assert sorted(done) == list(range(9))
        done.clear()
