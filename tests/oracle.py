"""Reference answers of upstream: `mlx_lm.stream_generate`, one request at a time, in a process of its own,
with a worker's BLAS and none of its modules. A request has `messages`, `tokens` (its answer has `max_tokens`
tokens) or `prompt`, and may have `rule` (a seed of `tests.worker.rules`), `ignore_eos` and `kv` (how its
KV caches are quantized from its first token on)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from worker.process.preload import preload_openblas

Request = dict[str, Any]


class Oracle:
    """The reference process. It answers batches of requests in order, while the caller does other work."""

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

    def ask(self, folder: Path, requests: Sequence[Request], adapter: Path | None = None) -> None:
        assert self._process.stdin is not None
        question = {"folder": str(folder), "requests": requests, "adapter": adapter and str(adapter)}
        json.dump(question, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """Return the answers to the oldest pending batch: `text` and `tokens` of each request."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the oracle has ended; its reason is on stderr"
        answers: list[dict[str, Any]] = json.loads(line)
        return answers


class StoredOracle(Oracle):
    """`Oracle` that keeps its answers in a user's temporary files, for requests that are always the same."""

    def __init__(self) -> None:
        self._files: list[Path] = []

    def ask(self, folder: Path, requests: Sequence[Request], adapter: Path | None = None) -> None:
        weights = [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
        question = [weights, version("mlx"), version("mlx-lm"), str(adapter), *requests]
        key = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]
        self._files.append(Path(tempfile.gettempdir()) / f"roundhouse-answers-{os.getuid()}-{key}.json")
        if not self._files[-1].exists():
            super().ask(folder, requests, adapter)

    def hear(self) -> list[dict[str, Any]]:
        file = self._files.pop(0)
        if file.exists():
            answers: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
            return answers
        answers = super().hear()
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answers), encoding="utf-8")
        draft.rename(file)
        return answers


def main() -> None:
    preload_openblas(sys.argv)
    for line in sys.stdin:
        question = json.loads(line)
        generate = _open(Path(question["folder"]), question.get("adapter"))
        print(json.dumps([generate(request) for request in question["requests"]]), flush=True)


def _open(folder: Path, adapter: str | None = None) -> Callable[[Request], dict[str, Any]]:
    """Load a model and return its generator: mlx-lm's, or mlx-vlm's if only that has the family."""
    from worker.load.config import in_mlx_lm, read_config

    if not in_mlx_lm(read_config(folder, folder.name)):
        return partial(_generate_whole, open_whole(folder))
    from mlx_lm.utils import load

    model, tokenizer, *_ = load(str(folder), adapter_path=adapter)
    return partial(_generate, model, tokenizer)


def open_whole(folder: Path) -> Any:
    """Load mlx-vlm's model. It logs the parts that have no weights, which is silenced."""
    from mlx_vlm.utils import load_model

    logging.getLogger().setLevel(logging.ERROR)
    return load_model(folder)


def _generate_whole(network: Any, request: Request) -> dict[str, Any]:
    """Generate from a tokenized prompt with `generate_step`, which `mlx_vlm.stream_generate` is built on."""
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

    endless = "tokens" in request or request.get("ignore_eos", False)
    prompt = request.get("tokens") or request.get("prompt")
    if prompt is None:
        prompt = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    ends = tokenizer.eos_token_ids
    if endless:
        tokenizer.eos_token_ids = set()
    steps = mlx_lm.stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=request["max_tokens"],
        logits_processors=_processors(request),
        prompt_cache=_caches(model, request.get("kv")),
    )
    # The last step reports the end token, which is not part of the text.
    ids = [step.token for step in steps if endless or step.token not in ends]
    tokenizer.eos_token_ids = ends
    # Decoded whole: upstream's streaming detokenizer drops a leading space.
    return {"tokens": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}


def _caches(model: Any, kv: dict[str, int] | None) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    if kv is None:
        return caches
    return [cache.to_quantized(**kv) if hasattr(cache, "to_quantized") else cache for cache in caches]


if __name__ == "__main__":
    main()
