"""Random scenarios of rows on a group of ranks over loopback, compared with upstream in one process.

    python -m tests.worker.ranks.lives --seeds 4 qwen3:tensor:2 qwen3_5:pipeline:3 qwen3:tensor:2:lookup

Plays that many seeds on each, in a process of its own, and prints what is wrong. Without names: all families
that upstream can shard, both ways, over `--ranks`. With the fourth part, `lookup`, rows are fed drafts,
which are sometimes right.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

from protocol.hosts import Mode
from protocol.settings.worker import WorkerSettings
from tests.models.families import PREFIX, REFUSED, THIRDS
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.ports import free_ports
from tests.worker.families import ROWS, is_tie
from tests.worker.zoo import play, possible
from worker.interfaces import Model
from worker.process.preload import preload_openblas

LIFE_S_MAX = 600.0
HERE = "127.0.0.1"

TENSOR = [
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash", "longcat_flash_ngram",
    "minimax", "minimax_m3_vl", "ministral3", "mistral4", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_moe", "step3p5",
]  # fmt: skip
PIPELINE = [
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe", "glm4_moe_lite", "kimi_k3",
    "minimax_m3_vl", "ministral3", "mistral4", "qwen2", "qwen3_5", "qwen3_moe", "qwen3_next",
]  # fmt: skip

RANKS = 2
LOOKUP = "lookup"
OTHERS = (
    "kimi_k3:pipeline:3",
    "qwen3:tensor:2:lookup",
    "qwen3_moe:pipeline:2:lookup",
)


class Case(NamedTuple):
    """A family, how it is sharded, and whether its rows are fed drafts."""

    family: str
    mode: Mode
    ranks: int
    drafts: str = ""

    @classmethod
    def of(cls, name: str) -> Case:
        family, mode, ranks, *drafts = name.split(":")
        return cls(family, cast("Mode", mode), int(ranks), *drafts)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.family, self.mode, str(self.ranks), self.drafts)))

    @property
    def model(self) -> str:
        """Name of the tiny model."""
        return (THIRDS if self.ranks % 2 else PREFIX) + self.family


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case. `wrong`: differences, empty if all rows are equal; `seen`: events of rows."""

    wrong: list[str]
    seen: list[str]
    seconds: float = 0.0


def hostfile(folder: Path, ranks: int, host: str = HERE) -> Path:
    """Write a hostfile of `ranks` ranks on this machine. `host`: the ssh host of those beyond the first."""
    path = folder / "hosts.json"
    hosts = [{"ssh": each, "ips": [HERE]} for each in (HERE, *[host] * (ranks - 1))]
    path.write_text(json.dumps(hosts))
    return path


def live(case: Case, seeds: range, host: str = HERE, rows: int = ROWS) -> Outcome:
    """Run the case in a process of its own, which becomes the first rank. `host`: see `hostfile`. `rows`: per
    scenario. Raises `AssertionError` if the process dies."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.worker.ranks.lives", "--host", host]
    flags = {"first-seed": seeds.start, "seeds": len(seeds), "rows": rows}
    command += [*(f"--{name}={value}" for name, value in flags.items()), "--here", str(case)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S_MAX, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    assert lines, f"{case}: status {ended.returncode}\n{ended.stderr[-3000:]}"
    told = json.loads(lines[-1])
    return Outcome(**(told | {"seconds": round(time.monotonic() - began, 1)}))


def _live_here(case: Case, seeds: range, host: str, rows: int) -> Outcome:
    name = case.model
    faults: list[str] = []
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, Oracle() as oracle:
        model = load(case, Path(folder), host)
        for seed in seeds:
            played = play(model, name, seed, oracle, rows, drafted=case.drafts == LOOKUP)
            seen |= played.seen
            apart = [found for found in played.differences if not is_tie(name, found)]
            faults += [f"seed {seed}, {found.job.name}, token {found.index}" for found in apart]
    if missing := possible(model) - seen:
        faults += [f"never {' or '.join(sorted(missing))}"] * (len(seeds) > 4)
    return Outcome(faults, sorted(seen))


def load(case: Case, folder: Path, host: str = HERE) -> Model:
    """Load the tiny model of a case; this process becomes the first rank of its group."""
    from worker.ranks.loader import SetLoader
    from worker.ranks.rendezvous import Rendezvous

    settings = WorkerSettings(
        model=str(model_folder(case.model)),
        speculation="auto" if case.drafts else None,
        hosts=hostfile(folder, case.ranks, host),
        hosts_port=free_ports(case.ranks)[0],
        split=case.mode,
        text_only=True,
    )
    meeting = Rendezvous(settings, "ring", None)
    return SetLoader(settings, meeting).load(lambda done, total: None)


def main(arguments: Sequence[str]) -> int:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=ROWS, help="in each life")
    parser.add_argument("--ranks", type=int, default=RANKS, help="of all families")
    parser.add_argument("--here", action="store_true", help="one case, in this process")
    parser.add_argument("--host", default=HERE, help="how the other ranks are reached")
    parser.add_argument("cases", nargs="*", metavar="family:mode:ranks[:drafts]")
    given = parser.parse_args(arguments)
    cases = [Case.of(name) for name in given.cases]
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    if given.here:
        logging.basicConfig(level=logging.INFO)
        print(json.dumps(asdict(_live_here(cases[0], seeds, given.host, given.rows))), flush=True)
        os._exit(0)
    status = 0
    for case in cases or every_case(given.ranks):
        try:
            outcome = live(case, seeds, given.host, given.rows)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            outcome = Outcome([str(error)], [])
        status |= bool(outcome.wrong)
        verdict = "; ".join(outcome.wrong) or "equal"
        print(f"{case}: {verdict} ({', '.join(outcome.seen)}), {outcome.seconds} s", flush=True)
    return status


def every_case(ranks: int) -> list[Case]:
    """Return all cases over `ranks` ranks; for two ranks, `OTHERS` too."""
    modes: list[tuple[Mode, list[str]]] = [("tensor", TENSOR), ("pipeline", PIPELINE)]
    named = [(family, mode) for mode, families in modes for family in families if family not in REFUSED]
    plain = [Case(family, mode, ranks) for family, mode in named]
    return [*plain, *(Case.of(name) for name in OTHERS if ranks == RANKS)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
