"""The embedded model, served when no other is named: a first start needs neither a download nor a network.

A real, if tiny, Qwen3.5 vision-language model in the shape this project is about, gated-delta layers and full
attention by turns, trained from nothing on dialogues that our own script writes. See README.md beside it.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
"""The model's folder in Hugging Face's format."""
