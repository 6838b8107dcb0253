"""Check of one upstream family: its tiny model runs random scenarios that are compared with upstream alone,
or the loader refuses it in a sentence.

    echo lfm2-vl | python -m tests.worker.families --seeds 4

Reads names from stdin and prints the outcome of each as a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.models import whole_families
from tests.models.families import CUT_SHOWS, PREFIX, REFUSED
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.worker.zoo import TIE, Difference, gap, play, possible
from worker.interfaces import Model, ModelError
from worker.load import capabilities
from worker.load.load import ModelLoader
from worker.process.preload import preload_openblas
from worker.runner.kv import buckets
from worker.runner.runner import BatchEngine

ROWS = 9
COLUMNS_STEP = 16
"""Growth step of buffers, small so that short runs outgrow them and rows are grouped by length."""
SEEDS_MAX = 30
"""Maximum number of seeds played until every kind of event has happened to a row."""
TOKENS_MIN = 8
"""Minimum of distinct tokens in the most varied answer: a model that repeats itself reveals no errors."""

Verdict = Literal["equal", "refused", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a family. `batched`: rows share forward passes; `padded`: prompts do too; `reuse`: positions
    where stored rows can resume; `why`: missing capabilities with their reasons, or what is wrong."""

    family: str
    verdict: Verdict
    batched: bool = False
    padded: bool = False
    reuse: str = ""
    why: str = ""
    seconds: float = 0.0


def prove(family: str, seeds: int, oracle: Oracle) -> Outcome:
    """Check a family. Never raises: failures are reported in the outcome."""
    began = time.monotonic()
    try:
        told = _refused(family) if _is_refused(family) else _played(family, seeds, oracle)
    except (Exception, SystemExit) as error:  # any error of upstream or ours belongs in the table
        told = {"verdict": "wrong", "why": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return Outcome(family, **told, seconds=round(time.monotonic() - began, 1))


def _is_refused(family: str) -> bool:
    return family in REFUSED or family in whole_families.REFUSED


def _played(family: str, seeds: int, oracle: Oracle) -> dict[str, Any]:
    name = PREFIX + family
    model = ModelLoader(str(model_folder(name))).load(lambda done, total: None)
    assert isinstance(model, Model)
    faults = _faults(model, name, seeds, oracle, whole=family in CUT_SHOWS)
    assert isinstance(model.engine, BatchEngine)
    capabilities = model.engine.capabilities
    if capabilities.cut == (family in CUT_SHOWS):
        faults.append(f"prompts {'can' if capabilities.cut else 'cannot'} be cut")
    return {
        "verdict": "wrong" if faults else "equal",
        "batched": capabilities.together,
        "padded": capabilities.padded,
        "reuse": _reuse(model),
        "why": "; ".join(faults or capabilities.reasons),
    }


def _faults(model: Model, name: str, seeds: int, oracle: Oracle, *, whole: bool) -> list[str]:
    """Run at least `seeds` scenarios, and more until every kind of event has happened."""
    faults: list[str] = []
    seen: set[str] = set()
    tokens = 0
    missing = set() if whole else possible(model)
    for seed in range(SEEDS_MAX):
        if seed >= seeds and not missing - seen:
            break
        played = play(model, name, seed, oracle, ROWS, whole=whole)
        seen |= played.seen
        tokens = max(tokens, played.tokens)
        wrong = [found for found in played.differences if not is_tie(name, found)]
        faults += [f"seed {seed}, {found.job.name}, token {found.index}" for found in wrong]
    if missing - seen:
        faults.append(f"never {' or '.join(sorted(missing - seen))}")
    if tokens < TOKENS_MIN:
        faults.append(f"too dull: {tokens} different tokens")
    return faults


def is_tie(name: str, found: Difference) -> bool:
    """Return whether rounding may have swapped two tokens. False for penalized rows."""
    return found.job.sampling.repetition_penalty == 1 and gap(name, found) <= TIE


def _reuse(model: Model) -> str:
    shape = model.engine.shape
    if shape is None:
        return "none"
    return "at snapshots" if shape.has_states else "within windows" if shape.window else "anywhere"


def _refused(family: str) -> dict[str, Any]:
    """Return the loader's refusal; for mlx-vlm's families the description of the family precedes it."""
    with tempfile.TemporaryDirectory() as home:
        try:
            ModelLoader(str(_folder(family, Path(home)))).load(lambda done, total: None)
        except ModelError as error:
            sentence = str(error).partition(": ")[2]
            is_named = sentence.endswith(".") and "Download" not in sentence
            what = f"{whole_families.REFUSED[family]}: " if family in whole_families.REFUSED else ""
            return {"verdict": "refused" if is_named else "wrong", "why": what + sentence}
    return {"verdict": "wrong", "why": "it loads after all"}


def _folder(family: str, home: Path) -> Path:
    """Return a model folder of the family. Where none is made, another family's model under its name."""
    with contextlib.suppress(SystemExit):
        if family in REFUSED or whole_families.is_made(family):
            return model_folder(PREFIX + family)
    folder = home / family
    shutil.copytree(model_folder("dense"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return folder


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    seeds = parser.parse_args().seeds
    buckets.COLUMNS_STEP = COLUMNS_STEP
    capabilities.look_up = lambda network: None  # what is checked here is the probe
    with Oracle() as oracle:
        for line in sys.stdin:
            print(json.dumps(asdict(prove(line.strip(), seeds, oracle))), flush=True)


if __name__ == "__main__":
    main()
