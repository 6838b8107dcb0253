"""Make the pocket model from scratch: tokenizer, training, evaluation, export.

    python -m recipes.pocket --out build/pocket

An interrupted run continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from recipes.pocket import together, weights
from recipes.pocket.evaluate import evaluate, table
from recipes.pocket.export import export
from recipes.pocket.model import CONTEXT_TOKENS
from recipes.pocket.tokenizer import make_tokenizer
from recipes.pocket.train import FIRST, THEN, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/pocket"), help="checkpoint, log and model/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", type=Path, help="model folder to grow, instead of training a young model")
    parser.add_argument("--dialogues", type=int, default=100, help="held-out dialogues per family")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    together.join()
    folder, young = options.out / "model", options.start or options.out / "young"
    if together.number() == 0:
        if options.start and not folder.exists():
            shutil.copytree(options.start, folder)
        if not (folder / "tokenizer.json").is_file():
            make_tokenizer(folder, CONTEXT_TOKENS, options.seed)
    together.wait()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not (young / "model.safetensors").is_file():
        young.mkdir(parents=True, exist_ok=True)
        model = train(young, tokenizer, options.seed, FIRST)
        if together.number() == 0:
            weights.write(model, young / "model.safetensors")
    together.wait()
    model = train(options.out, tokenizer, options.seed, THEN, start=young)
    if together.number() == 0:
        export(model, tokenizer, folder)
        print(table(evaluate(model, tokenizer, options.dialogues, options.seed)))


if __name__ == "__main__":
    main()
