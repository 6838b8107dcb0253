"""Downloads that the gateway orders: a process for each, so that neither gateway nor supervisor waits for the
network.

The order is the whole list of downloads that shall run. One that is missing in it is cancelled; a state stays
until its order is withdrawn, so a gateway that was restarted finds it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocol import lifeline
from protocol.supervisor_messages import PULLS_MAX, Pull, PullStage, PullState

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "deploy.machine.download")
FAILURE_CHARACTERS_MAX = 1000
LINE_BYTES_MAX = 65_536
END_S_MAX = 5.0
"""Time in seconds after which a cancelled download is killed."""


class _Progress(Struct):
    """A line of the downloading process."""

    done: int = 0
    total: int = 0
    stage: PullStage = "running"
    failure: str = ""


_progress: msgspec.json.Decoder[_Progress] = msgspec.json.Decoder(_Progress)


@dataclass(slots=True)
class _Download:
    """A download with its process and the thread that reads its progress."""

    state: PullState
    process: subprocess.Popen[bytes] | None = None
    """None: it could not be started."""
    reader: threading.Thread | None = None


class Pulls:
    """Downloads by the ids of their orders. `changed` is called on any thread after a change."""

    def __init__(self, changed: Callable[[], None], command: Sequence[str] = COMMAND) -> None:
        self._changed = changed
        self._command = command
        self._downloads: dict[str, _Download] = {}

    def states(self) -> list[PullState]:
        """Return the states of all downloads that are ordered, in the order of their start."""
        return [download.state for download in self._downloads.values()]

    def order(self, pulls: Sequence[Pull], line: int) -> None:
        """Start the new downloads, and cancel those that are missing. `line`: the lifeline's descriptor."""
        wanted = {pull.id for pull in pulls}
        for id in [id for id in self._downloads if id not in wanted]:
            self._end(self._downloads.pop(id))
        for pull in pulls:
            if pull.id not in self._downloads and len(self._downloads) < PULLS_MAX:
                self._start(pull, line)

    def close(self) -> None:
        """Cancel all downloads; an interrupted one is continued by the next order for its model."""
        while self._downloads:
            self._end(self._downloads.popitem()[1])

    def _start(self, pull: Pull, line: int) -> None:
        download = self._downloads[pull.id] = _Download(PullState(id=pull.id, model=pull.model))
        try:
            process = download.process = self._begin(pull.model, line)
            reader = threading.Thread(target=self._read, args=(download, process), name="pull", daemon=True)
            reader.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            self._end(download)
            download.process = None
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            failure = f"{pull.model}: the download could not be started: {why}"
            self._on_progress(download, _Progress(failure=failure))
            return
        download.reader = reader
        log.info("downloading %s", pull.model)

    def _begin(self, model: str, line: int) -> subprocess.Popen[bytes]:
        """Raises `OSError`."""
        return subprocess.Popen(
            [*self._command, model],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {lifeline.VARIABLE: str(line), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            pass_fds=(line,),
            start_new_session=True,
        )

    def _read(self, download: _Download, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            while line := lines.readline(LINE_BYTES_MAX):
                with contextlib.suppress(msgspec.MsgspecError):
                    self._on_progress(download, _progress.decode(line))
        if download.state.stage == "running":
            status = process.wait()
            self._on_progress(download, _Progress(failure=f"The download ended with status {status}."))

    def _on_progress(self, download: _Download, progress: _Progress) -> None:
        stage: PullStage = "failed" if progress.failure else progress.stage
        failure = progress.failure[:FAILURE_CHARACTERS_MAX]
        done, total = progress.done, progress.total
        if failure:
            done, total = download.state.done_bytes, download.state.total_bytes
            log.warning("not downloaded: %s", failure)
        state = replace(download.state, stage=stage, failure=failure, done_bytes=done, total_bytes=total)
        if state != download.state:
            download.state = state
            self._changed()

    def _end(self, download: _Download) -> None:
        process = download.process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if download.reader is not None:
            download.reader.join()
        elif process.stdout is not None:
            process.stdout.close()
