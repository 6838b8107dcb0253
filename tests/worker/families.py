"""A family of upstream's put to the proof: its tiny model loaded by the worker, random lives held against
upstream alone, or a refusal in a sentence.

    echo lfm2-vl | python -m tests.worker.families --seeds 4

prints the outcome as a line of JSON, and so on for every name it is given.
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
from worker.contract import Model, ModelError
from worker.engine.caches import grouping
from worker.models.load import ModelLoader
from worker.preload import preload_openblas

ROWS = 9
COLUMNS_STEP = 16
"""Buffers grow by so many, so that in lives this short they are outgrown and rows are grouped by length."""
SEEDS_MAX = 30
"""Played at the most until all that can happen to a row has happened."""
TOKENS_MIN = 8
"""Different ones in the liveliest answer: a model that repeats itself betrays no error."""

Verdict = Literal["equal", "refused", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """What came of a family. `batched`: rows share forward passes; `padded`: prompts, too; `reuse`: from
    where stored rows go on; `why`: what is not so and the reason, or what is wrong."""

    family: str
    verdict: Verdict
    batched: bool = False
    padded: bool = False
    reuse: str = ""
    why: str = ""
    seconds: float = 0.0


def prove(family: str, seeds: int, oracle: Oracle) -> Outcome:
    """Never raises: what fails is wrong, and says how."""
    began = time.monotonic()
    try:
        told = _refused(family) if _is_refused(family) else _played(family, seeds, oracle)
    except (Exception, SystemExit) as error:  # upstream's or ours, of any kind: it belongs into the table
        told = {"verdict": "wrong", "why": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return Outcome(family, **told, seconds=round(time.monotonic() - began, 1))


def _is_refused(family: str) -> bool:
    return family in REFUSED or family in whole_families.REFUSED


def _played(family: str, seeds: int, oracle: Oracle) -> dict[str, Any]:
    name = PREFIX + family
    model = ModelLoader(str(model_folder(name))).load(lambda done, total: None)
    assert isinstance(model, Model)
    faults = _faults(model, name, seeds, oracle, whole=family in CUT_SHOWS)
    abilities = model.engine.abilities
    if abilities.cut == (family in CUT_SHOWS):
        faults.append(f"prompts {'can' if abilities.cut else 'cannot'} be cut")
    return {
        "verdict": "wrong" if faults else "equal",
        "batched": abilities.together,
        "padded": abilities.padded,
        "reuse": _reuse(model),
        "why": "; ".join(faults or abilities.reasons),
    }


def _faults(model: Model, name: str, seeds: int, oracle: Oracle, *, whole: bool) -> list[str]:
    """Of so many lives, or more until everything has happened."""
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
    """Whether rounding may have turned two tokens about; of penalized ones it is not known."""
    return found.job.draw.repetition_penalty == 1 and gap(name, found) <= TIE


def _reuse(model: Model) -> str:
    shape = model.engine.shape
    if shape is None:
        return "none"
    return "at snapshots" if shape.has_states else "within windows" if shape.window else "anywhere"


def _refused(family: str) -> dict[str, Any]:
    """The loader's sentence, of mlx-vlm's behind what the family is."""
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
    """A model of the family; where there can be none, or its name is enough, another's under it."""
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
    grouping.COLUMNS_STEP = COLUMNS_STEP
    with Oracle() as oracle:
        for line in sys.stdin:
            print(json.dumps(asdict(prove(line.strip(), seeds, oracle))), flush=True)


if __name__ == "__main__":
    main()
