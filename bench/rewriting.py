"""An agent that rewrites a file of its prompt, over HTTP: our drafts, and those of `mlx_lm.server`.

    python -m bench.rewriting [--models dense,hybrid,ahead] [--batches 1,4,16] [--rounds 5] [--words 300]

The model copies what it is told but for a word in twenty or so (`bench.copier`). Sides, each a server of its
own on the same folder: ours without drafts; ours that looks up what repeats; ours with a draft model (the two
layers that copy); `mlx_lm.server`, and with that draft model; `mlx_vlm.server`, which takes trained drafters
alone. `hybrid` and `ahead` have one, a layer for multi-token prediction, with which ours and that are served.
`unlike`: with nothing to copy, a request whose answer repeats nothing: what looking costs there. Where a
side's texts are others than ours it is said so.
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
    "Tokens/s, the median of {rounds} rounds; over the same server without drafts, and ours over it, with "
    "prediction where it has that, else with lookup: the median of the rounds' own (smallest-largest)."
)

Sides = dict[str, tuple[str, tuple[str, ...]]]
"""The server of each, and its flags."""


def sides(small: Path | None = None, prediction: Path | None = None) -> Sides:
    """With those drafters that there are."""
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
    """Those that start; of the others it is said why."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Server] = {}
        for name, (kind, flags) in sides.items():
            try:
                found[name] = stack.enter_context(server(kind, folder, rows_max, flags=flags))
            except NotServing as error:
                print(f"{name}: {describe(error)}", file=sys.stderr)
        yield found


class Texts:
    """What a case asks, and what each side said to it."""

    def __init__(self, make: Callable[[int], str], batch: int, tokens: int) -> None:
        self._make = make
        self._batch = batch
        self._tokens = tokens
        self._said: dict[str, dict[str, str]] = {}

    def turn(self, name: str, asked: Server, number: int) -> Values:
        """One round of one side. Raises `RuntimeError` for an answer without text."""
        texts = [self._make(1000 * number + request) for request in range(self._batch)]
        fields = {"enable_thinking": True, "ignore_eos": False}
        work, answers = asyncio.run(burst(asked, texts, self._batch, self._tokens, **fields))
        if not all(answer.pieces for answer in answers):
            raise RuntimeError("an answer without text")
        # One side takes the first blank away.
        said = (answer.text.strip() for answer in answers)
        self._said.setdefault(name, {}).update({text[:40]: text for text in said})
        return {"tokens": work.amount, "seconds": work.seconds}

    def unlike(self) -> list[str]:
        """The sides that said something else than the first."""
        first, *others = self._said.items()
        return [name for name, said in others if said != first[1]]


def measured(case: str, texts: Texts, servers: dict[str, Server], rounds: int) -> list[list[str]]:
    """A line of the table for each side; one that fails says why."""
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
    from bench.copier import KINDS, PREDICTED_KINDS, SMALL, copier, file_text, prediction

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
    """The lines of a model that copies nothing."""
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
