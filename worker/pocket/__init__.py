"""The embedded model, served if no other is given: the first start needs neither a download nor a network.

A tiny but real Qwen3.5 vision-language model with alternating gated-delta and full-attention layers, trained
from scratch on dialogues that our own script generates. README.md in this folder describes it.
"""

from __future__ import annotations

from pathlib import Path

from protocol.common.model_folder import POCKET_FOLDER

MODEL_PATH: Path = POCKET_FOLDER
"""The model's folder in Hugging Face's format."""
