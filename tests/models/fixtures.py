"""Cache of test model folders, made once per user and version and shared by all processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from worker.pocket import MODEL_PATH

_HERE = Path(__file__).parent
_NAMES = (
    "configs", "corpus", "encoders", "families", "family_sizes", "make", "mtp_models",
    "tokenizer", "vision_configs", "vision_models", "weights", "whole_families", "whole_sizes",
    "whole_weights", "zoo", "zoo_attention", "zoo_parts", "zoo_states",
)  # fmt: skip
_SOURCES = (*(_HERE / f"{name}.py" for name in _NAMES), MODEL_PATH / "chat_template.jinja")
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "tokenizers")


def model_folder(name: str) -> Path:
    """Return the folder of the model `name` with seed 0, as `make.make_model` writes it. It must only be
    read.

    The first call takes a few seconds. Safe to call from several processes at once: the first to rename its
    folder wins, the others delete theirs. Raises ValueError for an unknown name.
    """
    home = _user_folder() / _fingerprint()
    folder = home / name
    if not folder.is_dir():
        home.mkdir(exist_ok=True)
        _make_aside(name, folder)
    return folder


def _make_aside(name: str, folder: Path) -> None:
    # Imported here so that gateway tests that find their model in the cache do not load MLX.
    from tests.models.make import make_model

    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        make_model(name, draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _user_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"roundhouse-test-models-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()[:16]
