"""`python -m tests.deploy.units.scripted_job`: the job of a worker with a spare, on the scripted engine."""

from __future__ import annotations

from deploy.units import worker_with_spare
from tests.scripted_worker.config import FakeSettings

if __name__ == "__main__":
    vars(worker_with_spare)["WorkerSettings"] = FakeSettings
    worker_with_spare.main()
