"""The draft model of a model: found, compared with it, and loaded beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.contract import ModelError
from worker.models.config import ModelConfig, read_config, reads, require_known
from worker.models.source import bytes_of, find_folder, weight_files

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from worker.engine.following import Followers
    from worker.models.trials import Trials


_TRAINED_KEYS = ("dflash_config", "speculators_model_type")
_TRAINED_KINDS = ("eagle", "dflash", "dspark", "_mtp", "_assistant")
"""What the configs of trained drafters have that those of language models have not."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model's files. `name`: what it was asked for by. `config`: of a language model; None: it was
    trained to go by what another one thinks."""

    name: str
    folder: Path
    config: ModelConfig | None
    files: list[Path]

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.files)


def find_draft(name: str) -> DraftModel:
    """Raises `ModelError` for what is neither a language model of mlx-lm's nor trained to draft."""
    folder = find_folder(name, partial(_inspect, name=name))
    return DraftModel(name, folder, _inspect(folder, name=name), weight_files(folder, name))


def _inspect(folder: Path, *, name: str) -> ModelConfig | None:
    if _is_trained(folder):
        return None
    config = read_config(folder, name)
    require_known(config, name)
    if not reads(config):
        raise ModelError(f"{name}: models of the architecture {config.architecture!r} cannot draft.")
    return config


def _is_trained(folder: Path) -> bool:
    """It is no language model, but goes by what another one thinks: EAGLE, DFlash and their like."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # which is told elsewhere
    if not isinstance(content, dict):
        return False
    named = " ".join(map(str, (content.get("model_type"), *(content.get("architectures") or ())))).lower()
    return any(key in content for key in _TRAINED_KEYS) or any(kind in named for kind in _TRAINED_KINDS)


def load_draft(
    found: DraftModel, config: ModelConfig, weight_bytes: int, tokenizer: TokenizerWrapper, trials: Trials
) -> Followers:
    """`config`: its own. `weight_bytes`, `tokenizer`: of the model that it drafts for. Raises `ModelError`,
    and what upstream raises."""
    from worker.engine.caches.trial import find_abilities
    from worker.engine.following import Followers
    from worker.models.load import load_weights
    from worker.models.rehearsal import stage_for
    from worker.models.tokenizers import Tokenizers
    from worker.models.trials import key_of

    own = Tokenizers(found.folder, config).take()
    if vocabulary_digest(own) != vocabulary_digest(tokenizer):
        raise ModelError(f"the draft model {found.name} has another tokenizer: choose one of its family.")
    network = load_weights(found.folder, lambda done, total: None)
    abilities = trials.abilities(
        key_of(found.folder, found.files, network), lambda: find_abilities(stage_for(found.folder, network))
    )
    if not abilities.ahead:
        reasons = "; ".join(abilities.reasons)
        raise ModelError(f"the draft model {found.name} cannot draft for several requests ({reasons}).")
    drafter = Followers(
        network,
        found.weight_bytes / weight_bytes,
        config.vocabulary or len(own),
        restorable=abilities.restorable,
    )
    _warm_up(drafter)
    return drafter


def vocabulary_digest(tokenizer: Any) -> str:
    """The same for tokenizers whose tokens have the same numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for number, token in sorted((number, token) for token, number in tokenizer.get_vocab().items()):
        digest.update(f"{number}\0{token}\0".encode())
    return digest.hexdigest()


def _warm_up(drafter: Followers) -> None:
    """Run every kind of pass once, so that no request waits for a kernel to be compiled."""
    drafter.read("0", (1, 2, 3, 4))
    for news in ((5,), (6, 7)):
        drafter.draft({"0": news, "1": news}, 3)
    drafter.reset()
