"""Draft model for speculative decoding: find its files, check its tokenizer, load it beside the target."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.interfaces import ModelError
from worker.load.config import ModelConfig, in_mlx_lm, inspect_folder
from worker.load.source import bytes_of, find_folder, weight_files

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from worker.load.probe_results import ProbeResults
    from worker.runner.drafters.draft_model import DraftModelProposer


_MTP_LAYERS = "qwen3_5_mtp"
"""Model type of multi-token-prediction layers in a folder of their own, as mlx-vlm writes them."""
_TRAINED_KEYS = ("dflash_config", "speculators_model_type")
_TRAINED_KINDS = ("eagle", "dflash", "dspark", "_mtp", "_assistant")
"""Identify other drafters that read a target's hidden states; configs of language models have none of
these."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model's files. `name`: as the user gave it. `config`: its language model config; None for
    multi-token-prediction layers."""

    name: str
    folder: Path
    config: ModelConfig | None
    files: list[Path]

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.files)


def find_draft(name: str) -> DraftModel:
    """Find a draft model's files. Raises `ModelError` unless it is an mlx-lm model or MTP layers."""
    folder = find_folder(name, partial(_inspect, name=name))
    return DraftModel(name, folder, _inspect(folder, name=name), weight_files(folder, name))


def _inspect(folder: Path, *, name: str) -> ModelConfig | None:
    kind = _drafter_kind(folder)
    if kind == _MTP_LAYERS:
        return None
    if kind:
        raise ModelError(
            f"{name}: drafters of this kind ({kind}) are not run: they read inner layers of the model. Name a"
            " small language model with the same tokenizer, or leave --draft-model out."
        )
    config = inspect_folder(folder, name)
    if not in_mlx_lm(config):
        raise ModelError(f"{name}: models of the architecture {config.architecture!r} cannot draft.")
    return config


def _drafter_kind(folder: Path) -> str:
    """Return the kind of a drafter that reads a target's hidden states (MTP, EAGLE, DFlash and similar);
    empty for anything else."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""  # `read_config` reports it
    if not isinstance(content, dict):
        return ""
    names = [str(name) for name in (*(content.get("architectures") or ()), content.get("model_type")) if name]
    if content.get("model_type") == _MTP_LAYERS:
        return _MTP_LAYERS
    is_trained = any(key in content for key in _TRAINED_KEYS) or any(
        kind in name.lower() for name in names for kind in _TRAINED_KINDS
    )
    return (names or ["of no name"])[0] if is_trained else ""


def load_draft(
    found: DraftModel,
    config: ModelConfig,
    weight_bytes: int,
    tokenizer: TokenizerWrapper,
    results: ProbeResults,
) -> DraftModelProposer:
    """Load the draft model and warm it up. `config`: of the draft model. `weight_bytes`, `tokenizer`: of the
    target model. `results`: of probes. Raises `ModelError`, or what upstream raises."""
    from worker.load.capabilities import capabilities_of
    from worker.load.text import Tokenizers
    from worker.load.weights import load_weights
    from worker.runner.drafters.draft_model import DraftModelProposer

    own = Tokenizers(found.folder, config).take()
    if vocabulary_digest(own) != vocabulary_digest(tokenizer):
        raise ModelError(
            f"the draft model {found.name} has another tokenizer. Choose one of the target's family."
        )
    network = load_weights(found.folder, lambda done, total: None)
    capabilities = capabilities_of(found.folder, network, found.files, results)
    if not capabilities.ahead:
        reasons = "; ".join(capabilities.reasons)
        raise ModelError(
            f"the draft model {found.name} cannot draft for several requests at once ({reasons})."
        )
    drafter = DraftModelProposer(network, found.weight_bytes / weight_bytes, config.vocabulary or len(own))
    _warm_up(drafter)
    return drafter


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest that is equal for tokenizers that give the same tokens the same ids."""
    digest = hashlib.blake2b(digest_size=16)
    for number, token in sorted((number, token) for token, number in tokenizer.get_vocab().items()):
        digest.update(f"{number}\0{token}\0".encode())
    return digest.hexdigest()


def _warm_up(drafter: DraftModelProposer) -> None:
    """Run each kind of pass once, so that no request waits for kernels to compile."""
    drafter.read("0", (1, 2, 3, 4))
    for new_tokens in ((5,), (6, 7)):
        drafter.draft({"0": new_tokens, "1": new_tokens}, 3)
    drafter.reset()
