"""What upstream says: `mlx_lm.stream_generate` alone, request after request, in a process of its own.

    echo '{"folder": …, "requests": [{"messages": […], "max_tokens": N}]}' | python -m tests.oracle

prints the answers' texts as a JSON list. The process has the same BLAS as a worker, so that a difference is
never a matter of libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from worker.preload import preload_openblas


def answers(folder: Path, requests: list[dict[str, Any]]) -> list[str]:
    """The greedy answers of the model in `folder` to `requests`, each generated alone."""
    question = json.dumps({"folder": str(folder), "requests": requests})
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle"], input=question, capture_output=True, text=True, check=True
    )
    texts: list[str] = json.loads(done.stdout)
    return texts


def main() -> None:
    preload_openblas(sys.argv)
    import mlx_lm
    from mlx_lm.utils import load

    question = json.load(sys.stdin)
    model, tokenizer = load(question["folder"])
    texts = []
    for request in question["requests"]:
        prompt = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
        ids = []
        for step in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=request["max_tokens"]):
            # The end token is reported as the last step's token, and is no part of the text.
            if step.token not in tokenizer.eos_token_ids:
                ids.append(step.token)
        # Decoded whole: upstream's streaming detokenizer drops a leading space.
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
