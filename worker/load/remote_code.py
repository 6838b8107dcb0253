"""Remote code: Python files that come with a model, which transformers runs if its caller trusts them.

A config names them under `auto_map`. We never trust them, but some processors of mlx-vlm do so without
asking, for the model's folder or for a repository of their own. A model that needs its code is not served, or
only for text.
"""

from __future__ import annotations

from typing import Any, NoReturn

from worker.interfaces import ModelError


def forbid_remote_code() -> None:
    """Make transformers refuse to run, or even to copy, code of any model in this process."""
    from transformers import dynamic_module_utils

    for name in ("get_cached_module_file", "get_class_in_module"):
        setattr(dynamic_module_utils, name, _refuse)


def _refuse(*given: Any, **options: Any) -> NoReturn:
    raise ModelError("its files ask to run code of their own (auto_map), which is never done.")
