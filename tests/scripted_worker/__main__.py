"""`python -m tests.scripted_worker`: like `python -m worker`, on the scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

from protocol import lifeline, sockets
from protocol.common import logs
from protocol.settings import reader as settings
from tests.scripted_worker.config import FakeSettings
from tests.scripted_worker.loader import FakeLoader
from worker.gateway.service import Service
from worker.process import spare
from worker.process.memory_pressure import StallFiles


def main() -> int:
    """Serve the gateway from scripts until a stop signal. Return the exit status."""
    document = spare.settings_document(("worker.gateway.service",))
    about = "Run a worker with a scripted engine, for tests."
    configured = settings.read_or_exit(
        FakeSettings,
        "worker",
        sys.argv[1:],
        {},
        program="tests.scripted_worker",
        about=about,
        document=document,
    )
    logs.setup("fake", "text", configured.log_level)
    lifeline.follow_parent()
    loader = FakeLoader(configured.served_name or configured.name, configured)
    try:
        file = configured.pressure_file
        source = StallFiles([Path(file)]) if file else None
        return Service(loader, configured, pressure=source).run()
    except sockets.EndpointError as error:
        settings.exit_with("tests.scripted_worker", error)


if __name__ == "__main__":
    raise SystemExit(main())
