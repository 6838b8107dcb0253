"""A test model whose tokenizer has fill-in-the-middle tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.models.fixtures import model_folder

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")


def infill_folder(folder: Path, markers: Sequence[str] = QWEN) -> Path:
    """Write a copy of `dense` into `folder`, with `markers` added to its tokenizer."""
    shutil.copytree(model_folder("dense"), folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    known = [entry["id"] for entry in tokenizer["added_tokens"]]
    first = 1 + max([*known, *tokenizer["model"]["vocab"].values()])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": first + index, "content": marker, **flags} for index, marker in enumerate(markers)
    ]
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder
