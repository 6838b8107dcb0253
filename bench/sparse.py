"""Accuracy and time to first token under sparse prefill of long prompts.

    python -m bench.sparse [--recall 1000] [--recall-keep 0.5] [--dialogues 20] [--first 4096] [--keep 0.3]

Recall: the embedded model is asked for something from the beginning of a long dialogue, and scores its own
prompts. Beyond some 1,500 tokens it recalls almost nothing, sparse or not; for longer prompts there is
`bench.recall`. Reported are correct answers with the whole prompt, the chosen part, as many random chunks,
and the last ones. First: time to first token of a larger random model, with a small one that scores its
prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from bench.models import bench_folder, random_tokens
from bench.timing import print_table
from recipes.pocket.fillers import Fillers
from recipes.pocket.recall import recall
from recipes.pocket.talk import noise
from worker.core.rows import Span
from worker.core.sparse_prefill import least
from worker.pocket import MODEL_PATH
from worker.runner.kv.sparse_rows import skipping
from worker.runner.token_importance import score_tokens

CHUNK = 512
ANSWER_TOKENS = 40


class Side:
    """A network and its caches of one prompt."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.caches: list[Any] = make_prompt_cache(network)

    def read(self, tokens: Sequence[int], spans: Sequence[Span] = ()) -> None:
        """Prefill all of `tokens` except the skipped `spans`."""
        at = 0
        for first, last in [*spans, (len(tokens), 0)]:
            while at < first:
                piece = tokens[at : min(at + CHUNK, first)]
                self.network(mx.array([list(piece)]), cache=self.caches)
                mx.eval([cache.state for cache in self.caches])
                at += len(piece)
            if last:
                self.caches = skipping(self.caches, first, last)
                at = last

    def say(self, last: int, count: int, ends: Sequence[int] = ()) -> list[int]:
        """Return the greedy tokens after `last`."""
        said: list[int] = []
        for _ in range(count):
            logits = self.network(mx.array([[last]]), cache=self.caches)
            found: Any = mx.argmax(logits[0, -1]).item()
            last = int(found)
            if last in ends:
                break
            said.append(last)
        return said


def long_dialogue(seed: int, tokens: int, encode: Callable[[list[Any]], list[int]]) -> tuple[list[int], str]:
    """Return a prompt that asks for something stated long before, and the correct answer."""
    fill = Fillers(random.Random(seed), held_out=True)
    while True:
        dialogue = recall(fill)
        *told, question, _ = dialogue.messages
        if told and "not told" not in dialogue.answer and "?" in str(question["content"]):
            break
    while len(encode([*told, question])) < tokens:
        other = [message for message in noise(fill, longest=60).messages if message["role"] != "system"]
        told = [*told, *other] if fill.chance(0.5) or told[0]["role"] == "system" else [*other, *told]
    return encode([*told, question]), dialogue.answer


def choices(tokens: Sequence[int], keep: float, importance_scorer: Side, seed: int) -> dict[str, list[Span]]:
    """Return the skipped spans of a prompt, by the method that chooses them."""
    count = len(tokens) - 1
    importance_scorer.read(tokens[:-1])
    weights: Any = score_tokens(importance_scorer.network, importance_scorer.caches, tokens[-1]).tolist()
    sampling = random.Random(seed)
    return {
        "all tokens": [],
        "chosen": least(weights, keep, 0),
        "at random": least([sampling.random() for _ in range(count)], keep, 0),
        "the last ones": least(list(map(float, range(count))), keep, 0),
    }


def recalled(tokens: int, dialogues: int, keep: float) -> None:
    network, tokenizer = load_model(MODEL_PATH)[0], load_tokenizer(MODEL_PATH)

    def encode(messages: list[Any]) -> list[int]:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        )

    right: dict[str, int] = {}
    for seed in range(dialogues):
        prompt, answer = long_dialogue(seed, tokens, encode)
        for name, spans in choices(prompt, keep, Side(network), seed).items():
            side = Side(network)
            side.read(prompt[:-1], spans)
            said = tokenizer.decode(side.say(prompt[-1], ANSWER_TOKENS, list(tokenizer.eos_token_ids)))
            right[name] = right.get(name, 0) + (said.strip() == answer)
        print(f"{seed + 1} of {dialogues}: {right}", flush=True)
    rows = [[name, f"{count / dialogues:.0%}"] for name, count in right.items()]
    print_table(
        f"Recall, {tokens:,} tokens, {keep:.0%} kept", ["", "correct"], rows, f"{dialogues} dialogues"
    )


def first_tokens(tokens: int, rounds: int, keep: float) -> None:
    large = load_model(bench_folder("dense"))[0]
    small = load_model(bench_folder("dense-small"))[0]
    ratios, seconds = [], []
    for seed in range(rounds + 1):
        prompt = random_tokens(tokens, seed)
        began = time.perf_counter()
        whole = Side(large)
        whole.read(prompt[:-1])
        whole.say(prompt[-1], 1)
        middle = time.perf_counter()
        spans = choices(prompt, keep, Side(small), seed)["chosen"]
        part = Side(large)
        part.read(prompt[:-1], spans)
        part.say(prompt[-1], 1)
        seconds.append((middle - began, time.perf_counter() - middle))
        ratios.append(seconds[-1][0] / seconds[-1][1])
    dense, sparse = (statistics.median(each[at] for each in seconds[1:]) for at in (0, 1))
    rows = [[f"{tokens:,}", f"{dense:.1f}", f"{sparse:.1f}", f"{statistics.median(ratios[1:]):.2f}"]]
    headings = ["tokens", "whole, s", "part, s", "speed-up"]
    print_table("First token", headings, rows, f"{keep:.0%} prefilled; scoring is included.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recall", default="1000", help="lengths of prompts in tokens; empty: none")
    parser.add_argument("--dialogues", type=int, default=20)
    parser.add_argument("--recall-keep", type=float, default=0.5, help="320 tokens are always prefilled")
    parser.add_argument(
        "--keep", type=float, default=0.3, help="share of the larger model's prompts that is prefilled"
    )
    parser.add_argument("--first", type=int, default=4096, help="tokens of a prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    for tokens in filter(None, asked.recall.split(",")):
        recalled(int(tokens), asked.dialogues, asked.recall_keep)
    if asked.first:
        first_tokens(asked.first, asked.rounds, asked.keep)


if __name__ == "__main__":
    main()
