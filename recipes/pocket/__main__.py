"""Make the pocket model from nothing: tokenizer, training, evaluation, export.

    python -m recipes.pocket --out build/pocket

A run that was broken off goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from recipes.pocket.evaluate import evaluate, table
from recipes.pocket.export import export
from recipes.pocket.model import CONTEXT_TOKENS
from recipes.pocket.tokenizer import make_tokenizer
from recipes.pocket.train import Plan, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/pocket"), help="checkpoint, log and model/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--start", type=Path, help="a model to go on from, at half the rates")
    parser.add_argument("--dialogues", type=int, default=100, help="held-out dialogues of each family")
    options = parser.parse_args()

    folder: Path = options.out / "model"
    if options.start and not folder.exists():
        shutil.copytree(options.start, folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        tokenizer = make_tokenizer(folder, CONTEXT_TOKENS, options.seed)
    plan = Plan(steps=options.steps, threads=options.threads)
    if options.start:
        plan = replace(plan, words_only=True, rate=0.6, decay_share=0.6)
    model = train(options.out, tokenizer, options.seed, plan, options.start)
    export(model, tokenizer, folder)
    print(table(evaluate(model, tokenizer, options.dialogues, options.seed)))


if __name__ == "__main__":
    main()
