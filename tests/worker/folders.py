"""Modified model folders, and the errors that loading them raises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models.fixtures import model_folder
from worker.interfaces import ModelError
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions


def nothing(done: int, total: int) -> None:
    pass


def copied(tmp_path: Path, name: str = "dense", **changes: Any) -> Path:
    """Copy a test model with changes to its config.json; a value of None removes the key."""
    folder = tmp_path / "a-model"
    shutil.copytree(model_folder(name), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def failure(model: str | Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        ModelLoader(str(model), LoadOptions(**options)).load(nothing)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message
