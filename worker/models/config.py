"""What a folder says its model is, read before anything heavy is imported or loaded."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protocol.modelfolder import why_no_config
from protocol.wording import in_words
from worker.contract import ModelError

CONTEXT_FALLBACK_TOKENS = 8192
"""For a model that names no limit: recurrent ones have none of their own."""
_CONTEXT_PLAUSIBLE_TOKENS_MAX = 2**27  # transformers writes 10^30 for "none" into tokenizer_config.json

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
    "seq_length",
    "model_max_length",
)

TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""What describes the language model, where it is a part."""
_VISION_KEYS = ("vision_config", "mm_vision_tower", "vision_tower")
"""What describes the part of a model that sees: in a few older ones it is but a name."""

ENCODERS = frozenset({"bert", "modernbert", "xlm-roberta"})
"""Architectures that read texts and write none: mlx-vlm's."""

_MODULE = re.compile(r"[\w-]+")
"""A module of mlx-lm's folder of models, by its file: `lfm2-vl` is no identifier."""

Kind = Literal["text", "vision"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says. `vocabulary` in tokens, 0 when it does not say; `end_tokens` are ids."""

    kind: Kind
    architecture: str
    context_length: int
    vocabulary: int
    end_tokens: tuple[int, ...]
    architectures: tuple[str, ...] = ()
    """The classes that it is an instance of, by transformers' names."""


def read_config(folder: Path, name: str) -> ModelConfig:
    """Raises `ModelError` for a folder without a readable config.json."""
    config = _read_object(folder / "config.json", name)
    text: dict[str, Any] = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), {})
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"{name}: config.json names no model_type. Name a language model's folder.")
    return ModelConfig(
        kind="vision" if any(config.get(key) for key in _VISION_KEYS) else "text",
        architecture=architecture,
        context_length=_context_length(folder, config, text),
        vocabulary=_first_count(("vocab_size",), config, text) or 0,
        end_tokens=_end_tokens(folder, config, text),
        architectures=tuple(str(each) for each in config.get("architectures") or ()),
    )


def require_known(config: ModelConfig, name: str) -> None:
    """Raises `ModelError` unless mlx-lm implements the architecture, or mlx-vlm. Imports none of their
    models."""
    if config.architecture in ENCODERS or reads(config) or sees(config):
        return
    from mlx_lm import __version__

    raise ModelError(
        f"{name}: mlx-lm {__version__} does not know the architecture {config.architecture!r}. "
        "A newer mlx-lm may; otherwise choose another model."
    )


def reads(config: ModelConfig) -> bool:
    """Whether mlx-lm implements the architecture."""
    from mlx_lm.utils import MODEL_REMAPPING

    return _is_module("mlx_lm", MODEL_REMAPPING.get(config.architecture, config.architecture))


def sees(config: ModelConfig) -> bool:
    """Whether mlx-vlm does."""
    from mlx_vlm.utils import MODEL_REMAPPING

    architecture = config.architecture.lower()
    return _is_module("mlx_vlm", MODEL_REMAPPING.get(architecture, architecture))


def _is_module(package: str, module: str) -> bool:
    return (
        _MODULE.fullmatch(module) is not None
        and importlib.util.find_spec(f"{package}.models.{module}") is not None
    )


def _read_object(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{name}: {why_no_config(file.parent)}") from None
    except PermissionError as error:
        raise ModelError(f"{name}: {in_words(error)}.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {file} cannot be read ({error}). Download the model again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {file} is not a JSON object. Download the model again.")
    return content


def _optional_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _first_count(keys: tuple[str, ...], *places: dict[str, Any]) -> int | None:
    values = (place.get(key) for place in places for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _context_length(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> int:
    tokenizer = _optional_object(folder / "tokenizer_config.json")
    told = _first_count(_CONTEXT_KEYS, text, config) or _first_count(("model_max_length",), tokenizer)
    return told if told and told <= _CONTEXT_PLAUSIBLE_TOKENS_MAX else CONTEXT_FALLBACK_TOKENS


def _end_tokens(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    """As upstream: generation_config.json's, else the model's own. The tokenizer's are added elsewhere."""
    generation = _optional_object(folder / "generation_config.json")
    told = next(
        (place["eos_token_id"] for place in (generation, config, text) if place.get("eos_token_id")), ()
    )
    tokens = told if isinstance(told, list | tuple) else (told,)
    return tuple(token for token in tokens if isinstance(token, int))
