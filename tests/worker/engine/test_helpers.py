"""Jobs that are shared among threads: each is done once, and others come only where it takes long."""

from __future__ import annotations

import threading

from worker.engine.sampling import helpers
from worker.engine.sampling.helpers import Helpers

WAIT_S_MAX = 20.0


def test_short_jobs_are_done_by_the_caller_alone() -> None:
    threads: list[str] = []
    Helpers(4).run([lambda: threads.append(threading.current_thread().name)] * 1)
    assert threads == [threading.current_thread().name]
    Helpers(4).run([])


def test_jobs_behind_a_long_one_are_done_at_the_same_time_and_each_once() -> None:
    long = threading.Event()
    meeting = threading.Barrier(3)  # nobody comes out unless three are in
    done: list[int] = []
    lock = threading.Lock()

    def meet(number: int) -> None:
        meeting.wait(WAIT_S_MAX)
        with lock:
            done.append(number)

    jobs = [lambda: long.wait(10 * helpers.ALONE_S_MAX) and None]
    jobs += [lambda number=number: meet(number) for number in range(9)]
    shared = Helpers(3)
    for _ in range(5):
        shared.run(jobs)
        assert sorted(done) == list(range(9))
        done.clear()


def test_one_thread_does_all_there_is() -> None:
    done: list[int] = []
    long = threading.Event()
    Helpers(1).run([lambda number=n: done.append(number) or (long.wait(0.002) and None) for n in range(5)])
    assert done == list(range(5))
