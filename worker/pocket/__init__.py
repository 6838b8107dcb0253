"""The embedded model, served when no other is named: a first start needs neither a download nor a network.

For now it is a random-weight hybrid (three gated-delta layers, one of full attention) in exactly the shape of
a real Qwen3.5 text model, with a trained tokenizer and a chat template. Its text is noise: it proves the
machinery, from loading to streaming, on any machine. A trained model will take its place in the same folder.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
"""The model's folder in Hugging Face's format."""
