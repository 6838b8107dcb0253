"""Test every model family of the installed mlx-lm, and mlx-vlm's other families: `make zoo [FAMILIES="…"]`.

Each must give upstream's answers or be refused with a reason. A run of all rewrites `docs/models.md` and the
table of capabilities."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.models import whole_families
from tests.models.families import CUT_SHOWS, listed
from tests.worker.families import Outcome

TABLE = Path("docs/models.md")
_MARK = "<!-- make zoo -->\n"
"""The tables follow this mark."""
_SECOND = """
## Families that mlx-vlm alone has

Served for text; [media.md](media.md) says which accept images. Other families of mlx-vlm are also in mlx-lm.

"""


class Prover:
    """A process that reads names of families and writes outcomes. It is restarted when it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._environ = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
        self._process: subprocess.Popen[str] | None = None

    def prove(self, family: str) -> Outcome:
        process = self._process or subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environ
        )
        assert process.stdin is not None
        assert process.stdout is not None
        print(family, file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("{"):  # upstream prints, too
                self._process = process
                return Outcome(**json.loads(line))
        process.communicate()
        self._process = None
        return Outcome(family, "wrong", why=f"its process died with status {process.returncode}")

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def prove_all(families: Iterable[str], command: Sequence[str], lanes: int) -> list[Outcome]:
    """Return the outcomes by name. `command`: of the process of each lane."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for family in families:
        waiting.put(family)
    outcomes: list[Outcome] = []

    def work() -> None:
        prover = Prover(command)
        try:
            while True:
                outcome = prover.prove(waiting.get_nowait())
                outcomes.append(outcome)
                print(_line(outcome), flush=True)
        except Empty:
            prover.close()

    with ThreadPoolExecutor(lanes) as pool:
        for lane in [pool.submit(work) for _ in range(lanes)]:
            lane.result()
    return sorted(outcomes, key=lambda outcome: outcome.family)


def _line(outcome: Outcome) -> str:
    return f"{outcome.family}: {outcome.verdict}, {outcome.seconds} s. {outcome.why}"


def tables(outcomes: Sequence[Outcome]) -> str:
    whole = set(whole_families.listed())
    first = [outcome for outcome in outcomes if outcome.family not in whole]
    second = [outcome for outcome in outcomes if outcome.family in whole]
    return table("mlx-lm", first) + _SECOND + table("mlx-vlm", second)


def table(library: str, outcomes: Sequence[Outcome]) -> str:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    served = [outcome for outcome in outcomes if outcome.verdict == "equal"]
    lines = [
        f"{library} {version(library)}, on a CPU: {len(outcomes)} families, {verdicts['equal']} served, "
        f"{sum(outcome.batched for outcome in served)} of them in batches, {verdicts['refused']} refused, "
        f"{verdicts['wrong']} wrong.",
        "",
        "| batched | prompts together | reuse | families |",
        "|---|---|---|---|",
        *(f"| {kind} | {names} |" for kind, names in _grouped(served, _capabilities)),
        "",
        *(f"* {reason}: {names}." for reason, names in _grouped(outcomes, _reason) if reason),
    ]
    return "\n".join(lines) + "\n"


def _grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> list[tuple[str, str]]:
    """Return the names of the families of each key, the key of most families first."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome.family)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [(name, ", ".join(families)) for name, families in ordered]


def _capabilities(outcome: Outcome) -> str:
    yes = {True: "yes", False: "no"}
    return f"{yes[outcome.batched]} | {yes[outcome.padded]} | {outcome.reuse}"


def _reason(outcome: Outcome) -> str:
    """Return why a family lacks something, without what differs by family; empty: it lacks nothing."""
    if outcome.verdict != "equal":
        why = outcome.why.replace(f"'{outcome.family}'", "…").partition(": mlx-vlm has the architecture")[0]
        return f"{outcome.verdict}: {_clean(why)}"
    reason = _clean(outcome.why)
    if (cut := CUT_SHOWS.get(outcome.family)) is not None:
        reason = f"{reason} (upstream's, too: {cut})"
    return reason


def _clean(why: str) -> str:
    """Return a reason without numbers of one family's."""
    why = re.sub(r"logits change by [\d.]+ of their spread", "logits change by …", why.replace("|", "/"))
    return re.sub(r" \(by [\d.]+\)", "", why).strip().removesuffix(".")


def families_in(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the served families of the document, and by family why it is refused or lacks something."""
    rows = re.findall(r"^\| (?:yes|no) \| (?:yes|no) \| [\w ]+ \| (.+) \|$", text, re.MULTILINE)
    reasons = re.findall(r"^\* (.+): ([\w, -]+)\.$", text, re.MULTILINE)
    served = [name for names in rows for name in names.split(", ")]
    return served, {name: reason for reason, names in reasons for name in names.split(", ")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="seeds for each family")
    parser.add_argument("--lanes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "families", nargs="*", metavar="family", help="default: all, and all tables are written"
    )
    asked = parser.parse_args()
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.worker.families", "--seeds", str(asked.seeds)]
    outcomes = prove_all(asked.families or [*listed(), *whole_families.listed()], command, asked.lanes)
    if not asked.families:
        before, mark, _ = TABLE.read_text(encoding="utf-8").partition(_MARK)
        TABLE.write_text(before + mark + tables(outcomes), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "tests.capabilities"], check=True)
    wrong = [outcome for outcome in outcomes if outcome.verdict == "wrong"]
    print(f"{len(outcomes)} families in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    for outcome in wrong:
        print(_line(outcome))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
