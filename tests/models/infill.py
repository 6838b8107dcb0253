"""A test model whose tokenizer names the tokens that fill a gap."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.models.fixtures import model_folder

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")


def infill_folder(folder: Path, markers: Sequence[str] = QWEN) -> Path:
    """A copy of `dense` in `folder`, with `markers` behind the tokens that it has."""
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
