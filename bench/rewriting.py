"""An agent that rewrites a file of its prompt, over HTTP: our speculation and that of `mlx_lm.server`.

    python -m bench.rewriting [--models dense,hybrid,ahead] [--batches 1,4,16] [--rounds 5] [--words 300]

The model copies its prompt except for about one word in twenty (`bench.copy_model`). Each side is a separate
server on the same folder: ours without drafts; ours with n-gram lookup; ours with a draft model (the two
layers that copy); `mlx_lm.server` without and with that draft model; `mlx_vlm.server`, which accepts only
trained drafters. `hybrid` and `ahead` have one, a layer for multi-token prediction, used with ours and
`mlx_vlm.server`. `unlike`: a request whose answer repeats nothing, which shows the cost of lookup. Sides
whose texts differ from ours are named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.client import burst
from bench.models import NAMES, bench_folder, random_text
from bench.rivals import NotServing, Server, server
from bench.timing import Work, compare, median_rate, print_table
from bench.versus.turns import Values, describe, take_turns

PLAIN, OURS, DRAFTED, THEIRS = "ours, no drafts", "ours, lookup", "ours, draft model", "mlx_lm.server"
THEIRS_DRAFTED = f"{THEIRS} --draft-model"
PREDICTED, VLM = "ours, prediction", "mlx_vlm.server"
VLM_PREDICTED = f"{VLM}, prediction"
WITHOUT = {OURS: PLAIN, DRAFTED: PLAIN, PREDICTED: PLAIN, THEIRS_DRAFTED: THEIRS, VLM_PREDICTED: VLM}
LEGEND = (
    "Tokens/s, median of {rounds} rounds; ratio to the same server without drafts, and ratio of ours to it, "
    "with prediction if it has that, else with lookup: median of the rounds' ratios (smallest-largest)."
)

Sides = dict[str, tuple[str, tuple[str, ...]]]
"""The server and flags of each side."""


def sides(small: Path | None = None, prediction: Path | None = None) -> Sides:
    """Return the sides, with the drafters that are available."""
    found: Sides = {
        PLAIN: ("roundhouse", ("--speculation", "off")),
        OURS: ("roundhouse", ("--speculation", "auto")),
        THEIRS: ("mlx_lm.server", ()),
        VLM: ("mlx_vlm.server", ()),
    }
    for folder, pair in ((small, (DRAFTED, THEIRS_DRAFTED)), (prediction, (PREDICTED, VLM_PREDICTED))):
        if folder is not None:
            found |= {name: (found[WITHOUT[name]][0], ("--draft-model", str(folder))) for name in pair}
    return found


@contextlib.contextmanager
def up(folder: Path, sides: Sides, rows_max: int) -> Iterator[dict[str, Server]]:
    """Run the servers that start; print why the others do not."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Server] = {}
        for name, (kind, flags) in sides.items():
            try:
                found[name] = stack.enter_context(server(kind, folder, rows_max, flags=flags))
            except NotServing as error:
                print(f"{name}: {describe(error)}", file=sys.stderr)
        yield found


class Texts:
    """The prompts of a case, and the answers of each side."""

    def __init__(self, make: Callable[[int], str], batch: int, tokens: int) -> None:
        self._make = make
        self._batch = batch
        self._tokens = tokens
        self._said: dict[str, dict[str, str]] = {}

    def turn(self, name: str, asked: Server, number: int) -> Values:
        """Run one round of one side. Raises `RuntimeError` for an answer without text."""
        texts = [self._make(1000 * number + request) for request in range(self._batch)]
        fields = {"enable_thinking": True, "ignore_eos": False}
        work, answers = asyncio.run(burst(asked, texts, self._batch, self._tokens, **fields))
        if not all(answer.pieces for answer in answers):
            raise RuntimeError("an answer without text")
        # One side strips the first blank.
        said = (answer.text.strip() for answer in answers)
        self._said.setdefault(name, {}).update({text[:40]: text for text in said})
        return {"tokens": work.amount, "seconds": work.seconds}

    def unlike(self) -> list[str]:
        """Return the sides whose answers differ from those of the first."""
        first, *others = self._said.items()
        return [name for name, said in others if said != first[1]]


def measured(case: str, texts: Texts, servers: dict[str, Server], rounds: int) -> list[list[str]]:
    """Return a row of the table for each side; the row of a side that fails has the reason."""
    taken = take_turns({name: partial(texts.turn, name, each) for name, each in servers.items()}, rounds)
    if different := texts.unlike():
        print(f"{case}: other texts from {', '.join(different)}", file=sys.stderr)
    done = {
        name: [Work(each["tokens"], each["seconds"]) for each in side.rounds] for name, side in taken.items()
    }
    lines = []
    for name, work in done.items():
        cells = [name, taken[name].note or "", "", ""]
        if taken[name].note is None:
            gain = str(compare(work, done[WITHOUT[name]])) if name in WITHOUT else ""
            own = done[PREDICTED if name == VLM_PREDICTED else OURS]
            over = "" if servers[name].name == "roundhouse" else str(compare(own, work))
            cells = [name, f"{median_rate(work):,.0f}", gain, over]
        lines.append([case if name == PLAIN else "", *cells])
        print(*lines[-1], file=sys.stderr, flush=True)
    return lines


def run(models: Sequence[str], batches: Sequence[int], rounds: int, words: int) -> None:
    from bench.copy_model import KINDS, PREDICTED_KINDS, SMALL, copier, file_text, prediction

    small = copier(SMALL)
    for model in models:
        folder = copier(KINDS[model])
        guessing = prediction(folder, KINDS[model]) if model in PREDICTED_KINDS else None
        lines: list[list[str]] = []
        with up(folder, sides(small, guessing), max(batches)) as servers:
            for batch in batches:
                texts = Texts(partial(file_text, folder, words), batch, words)
                lines += measured(f"rewritten, {batch} at once", texts, servers, rounds)
        if model in NAMES:
            lines += unlike(bench_folder(model), batches, rounds, words // 2)
        columns = ("", "", "tokens/s", "over no drafts", "ours over it")
        print_table(f"Rewriting over HTTP, {model}", columns, lines, LEGEND.format(rounds=rounds))


def unlike(folder: Path, batches: Sequence[int], rounds: int, words: int) -> list[list[str]]:
    """Return the rows of a model that copies nothing."""
    lines: list[list[str]] = []
    with up(folder, sides(), max(batches)) as servers:
        for batch in batches:
            texts = Texts(partial(random_text, folder, 100), batch, words)
            lines += measured(f"unlike, {batch} at once", texts, servers, rounds)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid,ahead")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", type=int, default=300)
    options = parser.parse_args()
    batches = [int(rows) for rows in options.batches.split(",")]
    run(options.models.split(","), batches, options.rounds, options.words)


if __name__ == "__main__":
    main()
