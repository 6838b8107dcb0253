"""The embedded model, served if no other is given: the first start needs neither a download nor a network.

A tiny but real Qwen3.5 vision-language model with alternating gated-delta and full-attention layers, trained
from scratch on dialogues that our own script generates. README.md in this folder describes it.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
"""The model's folder in Hugging Face's format."""
