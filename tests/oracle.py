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
import subprocess
import sys
from collections.abc import Sequence
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
    from mlx_lm.utils import load

    for line in sys.stdin:
        question = json.loads(line)
        model, tokenizer, *_ = load(question["folder"])
        said = [_generate(model, tokenizer, request) for request in question["requests"]]
        print(json.dumps(said), flush=True)


def _generate(model: Any, tokenizer: Any, request: Request) -> dict[str, Any]:
    import mlx_lm

    from tests.worker.rules import RuleGrammar, processor

    endless = "tokens" in request
    prompt = (
        request["tokens"]
        if endless
        else tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    )
    ends = tokenizer.eos_token_ids
    if endless:
        tokenizer.eos_token_ids = set()
    processors = [processor(RuleGrammar(request["rule"]))] if "rule" in request else None
    steps = mlx_lm.stream_generate(
        model, tokenizer, prompt, max_tokens=request["max_tokens"], logits_processors=processors
    )
    # The end token is reported as the last step's token, and is no part of the text.
    ids = [step.token for step in steps if endless or step.token not in ends]
    tokenizer.eos_token_ids = ends
    # Decoded whole: upstream's streaming detokenizer drops a leading space.
    return {"tokens": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}


if __name__ == "__main__":
    main()
