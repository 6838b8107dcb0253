"""Throughput with a draft model over throughput without it, for draft models that agree and that do not.

    python -m bench.draftmodel [--models dense,hybrid] [--batches 1,4,16] [--rounds 5]

In the target model all but the first few layers contribute little. The draft model consists of those first
few, and mostly agrees. `wrong`: a draft model with other random weights, which never agrees; of the hybrid
model also multi-token-prediction layers. Answers are greedy. For comparison upstream's method with the same
two models (`mlx_lm.server --draft-model`), for one request.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.drafts import compared
from bench.timing import Work, alternate, compare, median_rate, print_table
from worker.process.preload import preload_openblas

if TYPE_CHECKING:
    from bench.drafted import Case

LEGEND = (
    "Tokens/s without the draft model and with it, median of {rounds} rounds; their ratio, median of the "
    "ratios of the rounds (smallest-largest), by wall-clock and by CPU time; tokens per pass; accepted draft "
    "tokens of all."
)
PROMPT_TOKENS = 126
ANSWER_TOKENS = 128
UPSTREAM_GUESSES = 3
"""The number of draft tokens that `mlx_lm.server` uses."""


def case_of(rows: int) -> Case:
    """Return a case of `rows` greedy requests."""
    from bench.drafted import Case
    from bench.models import random_tokens
    from worker.values import EngineRequest, SamplingParams

    prompts = [tuple(random_tokens(PROMPT_TOKENS, row)) for row in range(rows)]
    return Case(
        [
            EngineRequest(str(row), prompt, SamplingParams(), (), ANSWER_TOKENS, frozenset())
            for row, prompt in enumerate(prompts)
        ]
    )


def run(models: Sequence[str], batches: Sequence[int], rounds: int) -> None:
    from bench.drafted import Drafted
    from bench.drafters import folders, with_mtp_layers
    from bench.ours import load

    for name in models:
        target, right, wrong = folders(name)
        rows = []
        sides: list[tuple[str, Path, Path | None]] = [
            ("agreeing", target, right),
            ("wrong", target, wrong),
        ]
        if name == "hybrid":
            sides.append(("MTP layers that are wrong", with_mtp_layers(target), None))
        for kind, folder, draft in sides:
            model = load(folder, draft)
            for batch in batches:
                make = partial(Drafted, model, batch)
                rows.append(compared(f"{kind}, {batch} rows", make, case_of(batch), rounds))
                print(*rows[-1], file=sys.stderr, flush=True)
        rows.append(_upstream(target, right, rounds))
        columns = ("", "off", "auto", "by wall clock", "by CPU time", "tokens a pass", "accepted")
        print_table(f"A draft model, {name}", columns, rows, LEGEND.format(rounds=rounds))


def _upstream(target: Path, draft: Path, rounds: int) -> list[str]:
    """Measure upstream's generator, alone and with the draft model; the cells are empty if it cannot use
    one."""
    from mlx_lm.utils import load_model

    network, guesser = load_model(target)[0], load_model(draft)[0]
    sides: dict[str, Callable[[], Work]] = {
        "off": partial(_generated, network, None),
        "on": partial(_generated, network, guesser),
    }
    try:
        done = alternate(sides, rounds)
    except ValueError as error:  # it cannot roll back recurrent states
        return ["upstream, 1 row", "", f"({error})", "", "", "", ""]
    rates = [f"{median_rate(done[side]):,.0f}" for side in ("off", "on")]
    return ["upstream, 1 row", *rates, str(compare(done["on"], done["off"])), "", "", ""]


def _generated(network: Any, guesser: Any | None) -> Work:
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step

    from bench.models import random_tokens

    prompt = mx.array(random_tokens(PROMPT_TOKENS, 0))
    if guesser is None:
        steps: Any = generate_step(prompt, network, max_tokens=ANSWER_TOKENS)
    else:
        steps = speculative_generate_step(
            prompt, network, guesser, num_draft_tokens=UPSTREAM_GUESSES, max_tokens=ANSWER_TOKENS
        )
    next(steps)
    began = time.perf_counter()
    count = sum(1 for _ in steps)
    return Work(count, time.perf_counter() - began)


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid", help="of dense, hybrid")
    parser.add_argument("--batches", default="1,4,16", help="rows that decode in one batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batches = [int(rows) for rows in options.batches.split(",")]
    run(options.models.split(","), batches, options.rounds)


if __name__ == "__main__":
    main()
