"""`python -m tests.scripted_worker`: like `python -m worker`, on the scripted engine."""

from __future__ import annotations

from protocol import lifeline, sockets
from protocol.common import logs
from protocol.settings import reader as settings
from protocol.settings.worker import WorkerSettings
from tests.scripted_worker.config import FakeSettings
from tests.scripted_worker.loader import FakeLoader
from worker import spare
from worker.transport.service import Service


def main() -> int:
    """Serve the gateway from scripts until a stop signal. Return the exit status."""
    words = spare.words(("worker.transport.service",))
    about = "Run a worker with a scripted engine, for tests."
    configured = settings.read_or_exit(
        FakeSettings, "worker", words, {}, program="tests.scripted_worker", about=about
    )
    logs.setup("fake", "text", configured.log_level)
    lifeline.follow_parent()
    loader = FakeLoader(configured.served_name or configured.name, configured)
    worker_settings = WorkerSettings(
        endpoint=configured.endpoint,
        curve_keys=configured.curve_keys,
        max_running=configured.max_running,
        cache_limit_bytes=configured.cache_limit_bytes,
        stall_timeout_s=configured.stall_timeout_s,
        drain_timeout_s=configured.drain_timeout_s,
    )
    try:
        return Service(loader, worker_settings).run()
    except sockets.EndpointError as error:
        settings.exit_with("tests.scripted_worker", error)


if __name__ == "__main__":
    raise SystemExit(main())
