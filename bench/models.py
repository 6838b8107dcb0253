"""The benchmarked models: the tests' architectures with random weights, sized so that a step takes
milliseconds.

They are float32, which a CPU's BLAS computes fastest.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from tests.models.fixtures import model_folder

VOCABULARY_WIDE = 151_936
"""The vocabulary size of Qwen3."""
CONTEXT = 32_768
WORDS = 1987
"""Token ids below this are ordinary text in the tests' tokenizer."""
TILE = 24
"""Patches along a side of an image."""

# Sections have no effect without images, but `mlx_vlm` loads no hybrid model without them.
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [3, 3, 2],
}
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}),
    "hybrid": ("hybrid", {"hidden_size": 256, "intermediate_size": 768, "rope_parameters": _MROPE}),
    "dense-small": ("dense", {}),
    "hybrid-small": ("hybrid", {"rope_parameters": _MROPE}),
    "dense-1024": ("dense", {"hidden_size": 1024, "intermediate_size": 3072}),
    "hybrid-1024": (
        "hybrid",
        {"hidden_size": 1024, "intermediate_size": 3072, "rope_parameters": _MROPE},
    ),
    "wide": ("dense", {"vocab_size": VOCABULARY_WIDE}),
}
NAMES = tuple(_SIZES)


def bench_folder(name: str) -> Path:
    """Return the model folder called `name`, written on first use beside the tests' own. Raises
    `KeyError`."""
    base, sizes = _SIZES[name]
    source = model_folder(base)
    folder = source.parent / f"bench-{name}-{_fingerprint(base, sizes)}"
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp(prefix=f".bench-{name}-", dir=folder.parent))
        try:
            _write(source, draft, sizes)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _fingerprint(base: str, sizes: dict[str, Any]) -> str:
    own = Path(__file__).read_bytes()
    return hashlib.sha256(own + f"{base} {sizes} {version('mlx')}".encode()).hexdigest()[:12]


def _write(source: Path, folder: Path, sizes: dict[str, Any]) -> None:
    # Imported here, so that a client whose model exists does not load MLX.
    import mlx.core as mx
    from tokenizers import Tokenizer

    from tests.models.weights import draw_weights

    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config).update(sizes, max_position_embeddings=CONTEXT)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    weights = draw_weights(config, tokenizer, seed=0)
    _silence_fragments(weights, tokenizer, tied=config["tie_word_embeddings"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _silence_fragments(weights: dict[str, Any], tokenizer: Any, *, tied: bool) -> None:
    """Make tokens that are not complete text unlikely, so that a server sends each token as a piece of its
    own."""
    import mlx.core as mx

    from tests.models.weights import loudness

    [name] = [n for n in weights if n.endswith("embed_tokens.weight" if tied else "lm_head.weight")]
    loud = loudness(tokenizer, weights[name].shape[0])
    weights[name] *= mx.array([1.0 if factor == 1.0 else 0.1 for factor in loud])[:, None]


def random_tokens(count: int, seed: int) -> list[int]:
    """Return a prompt that shares no prefix with that of another seed."""
    sampling = random.Random(seed)
    return [sampling.randrange(WORDS) for _ in range(count)]


def random_text(folder: Path, tokens: int, seed: int) -> str:
    """Return words of about `tokens` tokens that share no prefix with those of another seed."""
    known = words(folder)
    sampling = random.Random(seed)
    return " ".join(sampling.choice(known) for _ in range(tokens))


@functools.cache
def words(folder: Path) -> list[str]:
    """Return the tokens that are complete words."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    words = (token[1:] for token in vocabulary if token.startswith("Ġ"))
    return sorted(word for word in words if word.isalpha() and word.isascii())


def image_url(side: int, seed: int) -> str:
    """Return a JPEG unique to the seed, soft patches of random colours, as a data URL."""
    tile = Image.frombytes("RGB", (TILE, TILE), random.Random(seed).randbytes(3 * TILE * TILE))
    file = io.BytesIO()
    tile.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def question(text: str, urls: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a user's message about some images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
