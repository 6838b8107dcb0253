"""A worker beside a program that takes the memory: `python -m tests.faults.memory_pressure`, as root.

Worker and hogs share a control group with a limit: version 2 measures the stalls, and whichever version has
the memory controller sets the limit. Hogs write files, whose pages fill the group faster than a disk takes
them, and no anonymous memory, so that the kernel has no reason to kill anybody. Where no such group can be
made nothing is measured, and the program says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.faults.runner import run_program
from tests.faults.streams import Client
from tests.system import Process, System, chat_body, eventually, running_system

ROOM_BYTES = 3 * 2**26
"""Beyond the worker's own memory, for hogs and caches of files."""
HOGS, FILE_BYTES = 6, 2**29
LONG_WORDS = 580
ROSE_S_MAX, CALM_S_MAX = 150.0, 240.0
_ROOT = Path("/sys/fs/cgroup")
_HOG = """
import itertools, os, sys
size, name = int(sys.argv[1]), sys.argv[2]
file, block = os.open(name, os.O_RDWR | os.O_CREAT), os.urandom(2**20)
os.unlink(name)
for at in itertools.cycle(range(0, size, len(block))):
    os.pwrite(file, block, at)
"""


class Group:
    """A control group for one run, under version 2 and, if that has no memory controller, version 1."""

    def __init__(self) -> None:
        """Raises `OSError` if it cannot be made."""
        unified = _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "unified"
        has_memory = "memory" in (unified / "cgroup.controllers").read_text().split()
        limiting = unified if has_memory else _ROOT / "memory"
        self._limit_file = "memory.max" if has_memory else "memory.limit_in_bytes"
        self._anonymous = "anon" if has_memory else "total_rss"
        if has_memory:
            (unified / "cgroup.subtree_control").write_text("+memory")
        name = f"roundhouse-{os.getpid()}"
        self._folders = [parent / name for parent in dict.fromkeys((unified, limiting))]
        for folder in self._folders:
            folder.mkdir()

    def add(self, pid: int) -> None:
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def limit(self) -> int:
        """Limit the memory to `ROOM_BYTES` beyond what its processes have; return that."""
        limit = self.anonymous + ROOM_BYTES
        (self._folders[-1] / self._limit_file).write_text(str(limit))
        return limit

    @property
    def anonymous(self) -> int:
        """Bytes that its processes have allocated."""
        lines = (self._folders[-1] / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)[self._anonymous])

    @property
    def stalls(self) -> str:
        return (self._folders[0] / "memory.pressure").read_text().replace("\n", "; ")

    def close(self) -> None:
        """Remove it, once its processes are gone."""
        for folder in self._folders:
            eventually(lambda folder=folder: not (folder / "cgroup.procs").read_text(), within_s=60.0)  # type: ignore[misc]
            folder.rmdir()


@contextlib.contextmanager
def hogs(folder: Path, group: Group) -> Iterator[None]:
    command = [sys.executable, "-c", _HOG, str(FILE_BYTES)]
    processes = [subprocess.Popen([*command, str(folder / f"hog{number}")]) for number in range(HOGS)]
    try:
        for process in processes:
            group.add(process.pid)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Run:
    """The requests of a run, and what they have shown."""

    def __init__(self, system: System, worker: Process, group: Group) -> None:
        self._system, self._worker, self._group = system, worker, group
        self.wrong: list[str] = []

    def status(self) -> dict[str, Any]:
        [worker] = self._system.http.get("/v1/status?history=false").json()["workers"]
        return dict(worker)

    def await_relief(self, relief: str, within_s: float) -> float:
        began = time.monotonic()
        eventually(lambda: self.status()["pressure"]["relief"] == relief, within_s=within_s, what=relief)
        return time.monotonic() - began

    def show(self, when: str) -> int:
        """Print and return the bytes of the prefix cache in memory."""
        status = self.status()
        prefix = status["prefix"]
        swapped = self._worker.stats.memory_full_info().swap
        print(
            f"{when}: {status['pressure']}, prefixes {prefix['ram_bytes']:,} of {prefix['ram_limit']:,} bytes"
            f" in memory and {prefix['disk_bytes']:,} on disk, allocated in the group"
            f" {self._group.anonymous:,}, swapped {swapped:,}",
            flush=True,
        )
        self.wrong += [f"{when}: {swapped} bytes are swapped"] if swapped else []
        return int(prefix["ram_bytes"])

    def ask(self, text: str) -> httpx.Response:
        body = chat_body(text, max_tokens=24, temperature=0)
        return self._system.http.post("/v1/chat/completions", json=body, timeout=300)

    def expect(self, when: str, text: str, expected: str) -> None:
        """Ask, and note an answer other than the expected text."""
        response = self.ask(text)
        answer = content(response) if response.status_code == 200 else response.text[:200]
        self.wrong += [] if answer == expected else [f"{when}: {answer!r} for {expected!r}"]

    def expect_refusal(self, text: str) -> None:
        response = self.ask(text)
        message = response.json().get("error", {}).get("message", "")
        retry_after = response.headers.get("retry-after", "")
        print(f"long: {response.status_code}, Retry-After {retry_after}: {message}")
        if (response.status_code, retry_after) != (503, "30") or "short of memory" not in message:
            self.wrong.append(f"not refused: {response.status_code} {response.text[:200]}")

    def stream(self) -> Client:
        body = chat_body("Count.", max_tokens=2000, temperature=0, ignore_eos=True, stream=True)
        client = Client(self._system.url, body)
        client.start()
        return client


def content(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def long_prompt(name: str) -> str:
    return " ".join(f"{name}{number % 97}" for number in range(LONG_WORDS))


def exercise(run: Run, group: Group, folder: Path) -> None:
    short, longs = "What is a turntable?", [long_prompt(name) for name in "ab"]
    known = {text: content(run.ask(text)) for text in (short, *longs)}
    fresh = long_prompt("z")
    plain_stream = run.stream()
    plain_stream.join()
    before = run.show("before")
    limit = group.limit()
    print(f"limit {limit:,}")
    stream = run.stream()
    with hogs(folder, group):
        print(f"refuses after {run.await_relief('refuse_long', ROSE_S_MAX):.0f} s; {group.stalls}")
        during = run.show("during")
        if group.anonymous >= limit - ROOM_BYTES:
            run.wrong.append(f"what caches freed is still allocated: {group.anonymous}")
        run.wrong += [] if stream.is_alive() else ["the stream had ended before"]
        run.expect_refusal(fresh)
        run.expect("short", short, known[short])
        run.expect("next turn, from disk", longs[0], known[longs[0]])
    print(f"back to normal after {run.await_relief('none', CALM_S_MAX):.0f} s; {group.stalls}")
    stream.join()
    if stream.texts != plain_stream.texts:
        run.wrong.append(f"the stream differs: {stream.texts[0][-80:]!r}")
    for text, answer in known.items():
        run.expect("afterwards", text, answer)
    run.wrong += [] if run.ask(fresh).status_code == 200 else ["the long prompt is refused afterwards"]
    after = run.show("after")
    if not before or during * 4 > before or after <= during:
        run.wrong.append(f"the cache had {before}, {during} and {after} bytes")


def check(folder: Path, given: argparse.Namespace) -> Sequence[str]:
    """Run with the embedded model, `runs` times."""
    wrong: list[str] = []
    for number in range(given.runs):
        try:
            group = Group()
        except OSError as error:
            print(f"not measured: no control group with a limit of memory can be made here ({error})")
            return []
        own = folder / str(number)
        own.mkdir()
        with contextlib.closing(group), running_system(own) as system:
            worker = system.start_worker(module="worker")
            group.add(worker.pid)
            system.wait_ready()
            run = Run(system, worker, group)
            exercise(run, group, own)
            if not worker.running or run.status()["pid"] != worker.pid:
                run.wrong.append("the worker was killed")
        wrong += run.wrong
    return wrong


if __name__ == "__main__":
    run_program(__doc__, check, {"--runs": 1})
