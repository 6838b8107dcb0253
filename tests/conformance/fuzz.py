"""Requests that schemathesis generates from the OpenAPI document, for all routes of a real gateway.

Errors must have their dialect's format, streams their end, and the only 5xx is 503 with a Retry-After."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tests.conformance.drivers import Environment
from tests.conformance.environments import INSTALLED, make
from tests.models.fixtures import model_folder
from tests.system import System, running_system

ROUND_S_MAX = 3600
ROUNDS_MAX = 100
ROOT = Path(__file__).resolve().parents[2]
SCHEMATHESIS = Environment("schemathesis", "python", ("schemathesis==4.32.5",))

GENERATOR, EMBEDDER, RANKER = "fake", "bert-embedder", "roberta-reranker"
MODELS = {"": GENERATOR, "/v1/embeddings": EMBEDDER}
MODELS |= dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKER)
"""Models by path; the empty path is the default."""

ENDLESS = "/v1/status/stream"
"""A stream without an end."""

BODIES = 11
"""Operations with a body; their cases are unlimited, and other operations have few."""

CHECKS = ("answers_as_it_should", "response_schema_conformance", "content_type_conformance")
CONFIG = """
max-stream-events = 1000000
request-timeout = 60
[generation]
database = "none"
"""


def ask(
    program: Path, system: System, folder: Path, *, seed: int, cases: int, first: bool
) -> tuple[int, Counter[str]]:
    """Run a round of about `cases` cases; return the exit status and counts by method, path and status.

    `first`: include the boundary values of the document, which are the same in each round.
    """
    document, config, tally = (folder / name for name in ("openapi.json", "config.toml", "tally.json"))
    # From a file: schemathesis would not test the address it reads the document from.
    document.write_bytes(system.http.get("/openapi.json").content)
    config.write_text(CONFIG)
    each = max(1, cases // BODIES)
    command: list[str | Path] = [program, "--config-file", config, "run", document]
    command += ["--url", system.url, "--seed", str(seed)]
    command += ["--max-examples", str(each), "--checks", ",".join(CHECKS), "--continue-on-failure"]
    command += ["--phases", "coverage,fuzzing" if first else "fuzzing", "--suppress-health-check", "all"]
    command += ["--exclude-path", ENDLESS]
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "SCHEMATHESIS_HOOKS": "tests.conformance.hooks",
        "FUZZ_MODELS": json.dumps(MODELS),
        "FUZZ_TALLY": str(tally),
    }
    status = subprocess.run(command, env=env, cwd=folder, timeout=ROUND_S_MAX).returncode
    return status, Counter(json.loads(tally.read_text()))


def run(system: System, program: Path, folder: Path, *, seed: int, cases: int) -> tuple[bool, Counter[str]]:
    """Run rounds until there were `cases` cases; return whether all passed, and the counts of responses."""
    told: Counter[str] = Counter()
    for number in range(ROUNDS_MAX):
        left = cases - told.total()
        if left <= 0:
            break
        status, more = ask(program, system, folder, seed=seed + number, cases=left, first=number == 0)
        told += more
        if status:
            return False, told
    return True, told


def start(system: System) -> None:
    system.start_worker("--name", GENERATOR, "--images", "--videos")
    for name in (EMBEDDER, RANKER):
        system.start_worker("--model", str(model_folder(name)), module="worker")
    system.wait_loaded(3)


def told_by_status(told: Counter[str]) -> str:
    statuses: Counter[str] = Counter()
    for name, times in told.items():
        statuses[name.rpartition(" ")[2]] += times
    operations = {name.rpartition(" ")[0] for name in told}
    counted = ", ".join(f"{times} {status}" for status, times in statuses.most_common())
    return f"{told.total()} cases of {len(operations)} operations: {counted}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=5000, help="minimum number of cases")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    program = make(SCHEMATHESIS, INSTALLED) / "bin" / "schemathesis"
    with tempfile.TemporaryDirectory(prefix="rh-") as name, running_system(Path(name)) as system:
        start(system)
        well, told = run(system, program, Path(name), seed=given.seed, cases=given.cases)
        alive = all(process.running for process in (system.gateway, *system.workers))
    print(told_by_status(told) + ("" if alive else "; a process has died"))
    return 0 if well and alive else 1


if __name__ == "__main__":
    raise SystemExit(main())
