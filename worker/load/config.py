"""The model's config.json, read before anything heavy is imported or loaded, the task that it says the model
is for, and the code that it names, which is never run."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from protocol.common.error_text import describe_os_error
from protocol.common.model_folder import read_optional, why_no_config
from protocol.task_detection import ENCODERS, suggested_task, supported_tasks
from protocol.tasks import Task
from worker.interfaces import ModelError

log = logging.getLogger(__name__)

CONTEXT_FALLBACK_TOKENS = 8192
"""Context length of a model whose config has no limit, such as a recurrent one."""
_CONTEXT_PLAUSIBLE_TOKENS_MAX = 2**27  # transformers writes 10^30 into tokenizer_config.json for "no limit"

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
"""Keys of the language model's config, where it is one part of several."""
_VISION_KEYS = ("vision_config", "mm_vision_tower", "vision_tower")
"""Keys of the vision tower's config; in a few older models the value is only a name."""

_MODULE = re.compile(r"[\w-]+")
"""File name of a module in mlx-lm's models folder; `lfm2-vl` is not an identifier."""

Kind = Literal["text", "vision"]
_VERBS: dict[Task, str] = {"generate": "generate text", "embed": "embed texts", "rerank": "rank documents"}

Config = Mapping[str, Any]

_ROPE_KEY = "rope_parameters"
_BASES = ("rope_theta", "rotary_emb_base", "rope_embedding_base")
_LOCAL_BASES = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")
"""Of sliding-window layers, in families whose kinds of layers differ."""
_SHARES = ("partial_rotary_factor", "rotary_pct")
_APART = frozenset({"rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Contents of config.json. `vocabulary`: size in tokens, 0 if not given. `end_tokens`: token ids."""

    kind: Kind
    architecture: str
    context_length: int
    vocabulary: int
    end_tokens: tuple[int, ...]
    architectures: tuple[str, ...] = ()
    """Its model classes, by transformers' names."""


def read_config(folder: Path, name: str) -> ModelConfig:
    """Read config.json. Raises `ModelError` for a folder without a readable one, and for one with code."""
    config = _read_object(folder / "config.json", name)
    if config.get("model_file"):  # mlx-vlm would run it without asking
        raise ModelError(
            f"{name}: its config.json asks to run code of its own (model_file), which is never done."
        )
    text: dict[str, Any] = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), {})
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"{name}: config.json names no model_type. Give the folder of a language model.")
    return ModelConfig(
        kind="vision" if any(config.get(key) for key in _VISION_KEYS) else "text",
        architecture=architecture,
        context_length=_context_length(folder, config, text),
        vocabulary=_first_count(("vocab_size",), config, text) or 0,
        end_tokens=_end_tokens(folder, config, text),
        architectures=tuple(str(each) for each in config.get("architectures") or ()),
    )


def inspect_folder(folder: Path, name: str) -> ModelConfig:
    """Read config.json, and require that upstream implements the model. Raises `ModelError`."""
    config = read_config(folder, name)
    require_known(config, name)
    return config


def require_known(config: ModelConfig, name: str) -> None:
    """Raise `ModelError` unless mlx-lm or mlx-vlm implements the architecture. Imports none of their
    models."""
    if config.architecture in ENCODERS or in_mlx_lm(config) or in_mlx_vlm(config):
        return
    from mlx_lm import __version__

    raise ModelError(
        f"{name}: mlx-lm {__version__} does not know the architecture {config.architecture!r}. "
        "A newer mlx-lm may; otherwise choose another model."
    )


def in_mlx_lm(config: ModelConfig) -> bool:
    """Return whether mlx-lm implements the architecture."""
    from mlx_lm.utils import MODEL_REMAPPING

    return _is_module("mlx_lm", MODEL_REMAPPING.get(config.architecture, config.architecture))


def in_mlx_vlm(config: ModelConfig) -> bool:
    """Return whether mlx-vlm implements the architecture."""
    from mlx_vlm.utils import MODEL_REMAPPING

    architecture = config.architecture.lower()
    return _is_module("mlx_vlm", MODEL_REMAPPING.get(architecture, architecture))


def _is_module(package: str, module: str) -> bool:
    return (
        _MODULE.fullmatch(module) is not None
        and importlib.util.find_spec(f"{package}.models.{module}") is not None
    )


def find_task(folder: Path, config: ModelConfig, name: str, asked: Task | None) -> Task:
    """Return the task. `name`: the model's original name. `asked`: overrides the detection.

    Raises `ModelError` if the model cannot do that task.
    """
    able = supported_tasks(config.architecture, config.architectures)
    if asked is None:
        told = suggested_task(folder, name)
        if told and told not in able:
            log.warning("%s: seems to be made to %s, which is not supported", name, _VERBS[told])
        return told if told in able else able[0]
    if asked not in able:
        message = f"{name}: a model of the architecture {config.architecture!r} cannot {_VERBS[asked]} here."
        raise ModelError(message)
    return asked


def forbid_remote_code() -> None:
    """Make transformers refuse to run, or even to copy, code of any model in this process.

    A config names Python files that come with its model under `auto_map`. Some processors of mlx-vlm run
    them without asking, for the model's folder or for a repository of their own. A model that needs its code
    is not served, or only for text.
    """
    from transformers import dynamic_module_utils

    for name in ("get_cached_module_file", "get_class_in_module"):
        setattr(dynamic_module_utils, name, _refuse)


def _refuse(*given: Any, **options: Any) -> NoReturn:
    raise ModelError("its files ask to run code of their own (auto_map), which is never done.")


def _read_object(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{name}: {why_no_config(file.parent)}") from None
    except PermissionError as error:
        raise ModelError(f"{name}: {describe_os_error(error)}.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {file} cannot be read ({error}). Download the model again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {file} is not a JSON object. Download the model again.")
    return content


def _first_count(keys: tuple[str, ...], *places: dict[str, Any]) -> int | None:
    values = (place.get(key) for place in places for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _context_length(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> int:
    tokenizer = read_optional(folder / "tokenizer_config.json")
    told = _first_count(_CONTEXT_KEYS, text, config) or _first_count(("model_max_length",), tokenizer)
    return told if told and told <= _CONTEXT_PLAUSIBLE_TOKENS_MAX else CONTEXT_FALLBACK_TOKENS


def _end_tokens(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens that any of the configs lists, generation_config.json's first. Upstream takes the
    first list alone, and then goes on behind an end that only another names. The tokenizer's are added
    elsewhere."""
    generation = read_optional(folder / "generation_config.json")
    told = [place.get("eos_token_id") for place in (generation, config, text)]
    tokens = [token for each in told for token in (each if isinstance(each, list) else [each])]
    return tuple(dict.fromkeys(token for token in tokens if type(token) is int))


def rope_overrides(folder: Path) -> dict[str, Any]:
    """Return what to change in a folder's config for mlx-lm; empty for most.

    transformers 5 writes rotary embeddings under `rope_parameters`. About fifty of mlx-lm's families know
    the older keys alone: without them they use their default base, and answer wrongly without a word.
    """
    from mlx_lm.utils import _get_classes

    config = json.loads((folder / "config.json").read_bytes())
    if not _has_rope_parameters(config):
        return {}
    try:
        _, arguments = _get_classes(config)
    except ValueError:  # not a family of mlx-lm's
        return {}
    return translated_rope(config, inspect.signature(arguments).parameters)


def translated_rope(
    config: Config, known: Collection[str] | None = None, text: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the older keys, of a config and of its language model's. `known`, `text`: the keys that the
    family's arguments for each have; None: it is not known."""
    changed = _older_rope(config, known)
    # Some of mlx-vlm's have that key and do not read it.
    text = None if text is None else {*text} - {_ROPE_KEY}
    for key in TEXT_KEYS:
        if isinstance(inner := config.get(key), dict) and (told := _older_rope(inner, text)):
            changed[key] = inner | told
    return changed


def _has_rope_parameters(config: Config) -> bool:
    inner = [config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)]
    return any(isinstance(each.get(_ROPE_KEY), dict) for each in (config, *inner))


def _older_rope(config: Config, known: Collection[str] | None) -> dict[str, Any]:
    told = config.get(_ROPE_KEY)
    if not isinstance(told, dict) or (known is not None and _ROPE_KEY in known):
        return {}
    local: Config = {}
    if isinstance(told.get("full_attention"), dict):  # one for each kind of layer
        local, told = told.get("sliding_attention") or {}, told["full_attention"]
    scaling = {key: value for key, value in told.items() if key not in _APART}
    is_scaled = scaling.get("rope_type", "default") != "default" or len(scaling) > 1
    found = {
        _key_among(_BASES, known): told.get("rope_theta"),
        _key_among(_LOCAL_BASES, known): local.get("rope_theta"),
        _key_among(_SHARES, known): told.get("partial_rotary_factor"),
        "rope_scaling": scaling if is_scaled else None,
    }
    return {
        key: value
        for key, value in found.items()
        if value is not None and config.get(key) is None and (known is None or key in known)
    }


def _key_among(names: tuple[str, ...], known: Collection[str] | None) -> str:
    return next((name for name in names if known is not None and name in known), names[0])
