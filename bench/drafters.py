"""A model and two that draft for it, made in a folder. Imports MLX."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from tests.models.drafters import write_drafter
from tests.models.fixtures import model_folder
from tests.models.tokenizer import train_tokenizer
from tests.models.weights import draw_weights

WIDTH = 128
INNER = 384
LAYERS = 16
DRAFT_LAYERS = {"dense": 2, "hybrid": 4}
"""A hybrid's fourth is its first with attention."""
FAINT = 0.03
"""What the layers that only the model has add to it, in terms of what the others do."""
_OUTLETS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def folders(name: str) -> tuple[Path, Path, Path]:
    """Of `dense` or `hybrid`: the model, one that says much the same, and one that says something else."""
    home = Path(tempfile.mkdtemp(prefix=f"bench-drafters-{name}-"))
    source = model_folder(name)
    kept = DRAFT_LAYERS[name]
    large, small = _config(source, LAYERS), _config(source, kept)
    tokenizer = train_tokenizer(normalize=name == "hybrid")
    weights = {
        each: FAINT * array if _layer(each) >= kept and each.endswith(_OUTLETS) else array
        for each, array in draw_weights(large, tokenizer, 0).items()
    }
    first = {each: array for each, array in weights.items() if _layer(each) < kept}
    return (
        _written(home / "model", source, large, weights),
        _written(home / "right", source, small, first),
        _written(home / "wrong", source, small, draw_weights(small, tokenizer, 1)),
    )


def trained(target: Path, kind: str, prompts: Sequence[Sequence[int]], tokens: int, steps: int) -> Path:
    """A drafter for the model in the folder `target`, trained on what that answers these prompts with."""
    network = load_model(target)[0]
    said = [[*prompt, *_answer(network, prompt, tokens)] for prompt in prompts]
    folder = target.with_name(f"{kind}-{steps}")
    return write_drafter(kind, folder, network, mx.array(said, mx.uint32), steps)


def _answer(network: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    drawn: Any = generate_step(mx.array(list(prompt)), network, max_tokens=tokens)
    return [int(token) for token, _ in drawn]


def _config(source: Path, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    return copy.deepcopy(config)


def _layer(name: str) -> int:
    """The number of a parameter's layer; -1 of those that are in none."""
    _, _, rest = name.partition("layers.")
    return int(rest.split(".")[0]) if rest else -1


def _written(folder: Path, source: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
