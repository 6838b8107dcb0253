"""Process that downloads a model for the supervisor, and reports its progress as JSON lines on stdout.

python -m deploy.machine.download OWNER/NAME
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from deploy.machine import hub
from protocol import lifeline

LOOK_S = 0.5
"""Interval in seconds at which the size on disk is measured."""


def main() -> int:
    """Download the model named on the command line; return the exit status. The last line is the outcome."""
    lifeline.follow_parent()
    [model] = sys.argv[1:]
    try:
        missing = hub.missing_bytes(model)
        _pull(model, missing)
    except hub.HubError as error:
        _say(failure=str(error))
        return 1
    _say(done=missing, total=missing, stage="done")
    return 0


def _pull(model: str, missing: int) -> None:
    """Download the model while another thread reports what has arrived."""
    folder = hub.folder() / ("models--" + model.replace("/", "--"))
    before, is_over = _bytes_in(folder), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            _say(done=min(missing, max(0, _bytes_in(folder) - before)), total=missing)

    _say(done=0, total=missing)
    watch = threading.Thread(target=look, name="progress", daemon=True)
    watch.start()
    try:
        hub.pull(model)
    finally:
        is_over.set()
        watch.join()


def _bytes_in(folder: Path) -> int:
    """Return what the files of a model take on the disk, unfinished ones included."""
    found = 0
    for path in (folder / "blobs").glob("*"):
        try:
            found += path.stat().st_blocks * 512 if path.suffix == ".incomplete" else path.stat().st_size
        except OSError:
            continue  # it was renamed meanwhile
    return found


def _say(**progress: object) -> None:
    print(json.dumps(progress), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
