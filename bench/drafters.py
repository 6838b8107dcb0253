"""Writes a target model and two draft models into a folder. Imports MLX."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.models.fixtures import model_folder
from tests.models.mtp_models import make_unfitted_heads
from tests.models.tokenizer import train_tokenizer
from tests.models.weights import draw_weights

WIDTH = 128
INNER = 384
LAYERS = 16
DRAFT_LAYERS = {"dense": 2, "hybrid": 4}
"""Layers of the draft models. The fourth layer of a hybrid model is its first with attention."""
FAINT = 0.03
"""Factor on the outputs of the layers that only the target model has."""
_OUTLETS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def folders(name: str) -> tuple[Path, Path, Path]:
    """Write the models of `name` (`dense` or `hybrid`): the target, a draft model that mostly agrees, and one
    that does not."""
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


def with_mtp_layers(target: Path) -> Path:
    """Write a copy of a hybrid model with multi-token-prediction layers of random weights."""
    folder = target.with_name("mtp")
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["rope_parameters"]["mrope_section"] = [3, 3, 2]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_unfitted_heads(folder)
    return folder


def _config(source: Path, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text |= {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    return copy.deepcopy(config)


def _layer(name: str) -> int:
    """Return the layer number of a parameter, or -1 if it belongs to none."""
    _, _, rest = name.partition("layers.")
    return int(rest.split(".")[0]) if rest else -1


def _written(folder: Path, source: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
