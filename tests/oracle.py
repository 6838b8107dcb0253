"""What upstream says: `mlx_lm.stream_generate` alone, request after request, in a process of its own.

    echo '{"folder": …, "requests": [{"messages": […], "max_tokens": N}]}' | python -m tests.oracle

prints the answers as one line of JSON, and so on for every line it is given. A request with `tokens` in place
of `messages` is a prompt as it stands, and its answer does not end before `max_tokens`; with a `rule` it is
held to the grammar of that seed (`tests.worker.rules`). The process has the same BLAS as a worker, so that a
difference is never one of libraries, and nothing that a worker's modules may do to upstream's classes reaches
it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from worker.preload import preload_openblas

Request = dict[str, Any]


class Oracle:
    """The process. It answers in the order of the questions, while the caller does something else."""

    def __enter__(self) -> Oracle:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.oracle"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()

    def ask(self, folder: Path, requests: Sequence[Request]) -> None:
        assert self._process.stdin is not None
        json.dump({"folder": str(folder), "requests": requests}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """The answers to the oldest open question: `text` and `tokens` of each request."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the oracle has ended; its reason is on stderr"
        answers: list[dict[str, Any]] = json.loads(line)
        return answers


def main() -> None:
    preload_openblas(sys.argv)
    for line in sys.stdin:
        question = json.loads(line)
        generate = _open(Path(question["folder"]))
        print(json.dumps([generate(request) for request in question["requests"]]), flush=True)


def _open(folder: Path) -> Callable[[Request], dict[str, Any]]:
    """Upstream with its model: mlx-lm, or mlx-vlm where that alone has the family."""
    from worker.models.config import read_config, reads

    if not reads(read_config(folder, folder.name)):
        return partial(_generate_whole, open_whole(folder))
    from mlx_lm.utils import load

    model, tokenizer, *_ = load(str(folder))
    return partial(_generate, model, tokenizer)


def open_whole(folder: Path) -> Any:
    """mlx-vlm's network. What of it there are no weights for, it says on the log."""
    from mlx_vlm.utils import load_model

    logging.getLogger().setLevel(logging.ERROR)
    return load_model(folder)


def _generate_whole(network: Any, request: Request) -> dict[str, Any]:
    """A prompt as it stands, by the steps that `mlx_vlm.stream_generate` puts into text."""
    import mlx.core as mx
    from mlx_vlm.generate import generate_step

    ids = mx.array([request["tokens"]])
    steps = generate_step(
        ids,
        network,
        None,
        mx.ones_like(ids),
        max_tokens=request["max_tokens"],
        temperature=0.0,
        logits_processors=_processors(request),
    )
    return {"tokens": [token for token, _ in steps]}


def _processors(request: Request) -> list[Any] | None:
    from tests.worker.rules import RuleGrammar, processor

    return [processor(RuleGrammar(request["rule"]))] if "rule" in request else None


def _generate(model: Any, tokenizer: Any, request: Request) -> dict[str, Any]:
    import mlx_lm

    endless = "tokens" in request
    prompt = (
        request["tokens"]
        if endless
        else tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    )
    ends = tokenizer.eos_token_ids
    if endless:
        tokenizer.eos_token_ids = set()
    steps = mlx_lm.stream_generate(
        model, tokenizer, prompt, max_tokens=request["max_tokens"], logits_processors=_processors(request)
    )
    # The end token is reported as the last step's token, and is no part of the text.
    ids = [step.token for step in steps if endless or step.token not in ends]
    tokenizer.eos_token_ids = ends
    # Decoded whole: upstream's streaming detokenizer drops a leading space.
    return {"tokens": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}


if __name__ == "__main__":
    main()
