"""Models that copy their prompt with edits, as an agent rewrites a file: weights set by hand, without
training.

Two attention layers do it. The first has a head for each of the last three tokens, which rotary positions
select by distance; each puts that token's code beside the token itself. The second finds an earlier
occurrence of the same three tokens and outputs the token that followed: an induction head of three tokens.
Some tokens are output as others, which have the same code for matching: one word in some is rewritten, and
the words behind it are correct again. All other layers are random and nearly silent: they cost time and
change nothing. One kind also predicts the tokens after the next one, like models trained for multi-token
prediction.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.drafters import FAINT
from bench.models import CONTEXT, words
from tests.models.arrays import load_arrays
from tests.models.fixtures import model_folder
from tests.models.tokenizer import train_tokenizer
from tests.models.weights import draw_weights

INNER = 768
CODE = 40
"""Components of a token's code."""
HEAD = 64
LOOKED_FOR = 3
"""The number of last tokens that must match."""
REWRITTEN_EVERY = 40
"""Of this many words, two are each output as the other."""
SHARP = 10.0
"""Scale of queries and keys: scores are the product of both times eight times a cosine."""
LOUD = 6.0
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """An architecture. `turning`: components of a head that rotary positions turn. `still`: components that
    they do not turn, or hardly within a prompt. `looks`, `finds`: the two layers. `gate`: factor on an
    attention layer's output when its gate's input is zero. `seen`: preceding tokens that each position knows.
    `ahead`: tokens after the next one that are predicted.

    The hidden state of a token has parts: its code for matching, those of the tokens before, its own code,
    those of the output and of the tokens after it, and a constant one.
    """

    base: str
    prefix: str
    layers: int
    turning: int
    theta: float
    still: tuple[int, ...]
    looks: int
    finds: int
    gate: float = 1.0
    seen: int = LOOKED_FOR
    ahead: int = 0
    width: int = 256

    @property
    def own(self) -> int:
        """Offset of a token's own code."""
        return (self.seen + 1) * CODE

    @property
    def said(self) -> int:
        """Offset of the code of the output token, followed by those of the tokens after it."""
        return self.own + CODE

    @property
    def constant(self) -> int:
        """Offset of the constant one."""
        return self.said + (1 + self.ahead) * CODE

    @property
    def ones(self) -> int:
        """Number of codes that are present after a match, including the constant; it determines the scale of
        the norms."""
        return self.constant // CODE + 1

    @property
    def rope(self) -> dict[str, Any]:
        if self.turning == HEAD:
            return {"rope_theta": self.theta}
        sections = {"mrope_section": [3, 3, 2], "partial_rotary_factor": self.turning / HEAD}
        return {"rope_parameters": {"rope_type": "default", "rope_theta": self.theta, **sections}}


_SLOW = 12
"""Of 32 frequencies from 1 to 1e-12, the first that turns less than a tenth of a radian in 4,000 tokens."""
_STILL = (*range(_SLOW, 32), *range(32 + _SLOW, 64))
DENSE = Kind("dense", "model.", 8, HEAD, 1e12, _STILL, 0, 1)
HYBRID = Kind("hybrid", "language_model.model.", 8, 16, 1e4, tuple(range(16, 16 + CODE)), 3, 7, 0.5)
SMALL = Kind("dense", "model.", 2, HEAD, 1e12, _STILL, 0, 1)
"""The two copying layers alone."""
AHEAD = replace(HYBRID, seen=4, ahead=2, width=384)
KINDS = {"dense": DENSE, "hybrid": HYBRID, "ahead": AHEAD}
PREDICTED_KINDS = ("hybrid", "ahead")
"""The kinds for which `prediction` makes layers."""


def copier(kind: Kind) -> Path:
    """Write a model of `kind` into a new folder, and return it."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-copier-{kind.base}-")) / "model"
    source = model_folder(kind.base)
    # All share one tokenizer: a draft model's must equal the target's.
    shutil.copytree(model_folder("dense"), folder)
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text |= {"hidden_size": kind.width, "intermediate_size": INNER, "num_hidden_layers": kind.layers}
    text |= {**kind.rope, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    if kind.ahead:  # each head of layer `finds` has keys of its own
        text["num_key_value_heads"] = text["num_attention_heads"]
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = draw_weights(config, train_tokenizer(), 0)
    _hush(weights)
    _teach(weights, kind, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def prediction(folder: Path, kind: Kind) -> Path:
    """Write a layer for multi-token prediction of the copier in `folder` into a new folder.

    For a copier that predicts further tokens it outputs those. Otherwise it is the copier's own layer
    `finds`, behind a projection that moves the hidden state of the token before by one position; it must have
    read the prompt.
    """
    home = folder.with_name("prediction")
    home.mkdir()
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    config = {"model_type": "qwen3_5_mtp", "text_config": text | {"mtp_num_hidden_layers": 1}}
    (home / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    layer = f"{kind.prefix}layers.{kind.finds}."
    known = load_arrays(folder / "model.safetensors")
    weights = {
        f"layers.0.{name.removeprefix(layer)}": array
        for name, array in known.items()
        if name.startswith(layer)
    }
    if kind.ahead:
        weights["layers.0.self_attn.o_proj.weight"] *= 0
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    weights |= {f"{name}.weight": mx.ones((kind.width,)) for name in norms}
    weights["fc.weight"] = _array(_moved_ahead(kind) if kind.ahead else _moved_back(kind))
    mx.save_safetensors(str(home / "model.safetensors"), weights, metadata={"format": "mlx"})
    return home


def file_text(folder: Path, tokens: int, seed: int) -> str:
    """Return a request to rewrite a file of `tokens` words, one token each. It begins like the answer, so
    that its first word follows there."""
    known, sampling = words(folder), random.Random(seed)
    return "assistant\n" + "".join(f" {sampling.choice(known)}" for _ in range(tokens))


def _hush(weights: dict[str, mx.array]) -> None:
    for name in weights:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] *= FAINT / 3
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            weights[name] = mx.ones_like(weights[name])


def _teach(weights: dict[str, mx.array], kind: Kind, folder: Path) -> None:
    sampling = np.random.default_rng(0)
    count = weights[f"{kind.prefix}embed_tokens.weight"].shape[0]
    codes = sampling.normal(size=(2, count, CODE))
    looks, own = codes / np.linalg.norm(codes, axis=2, keepdims=True)
    others = _rewritten(count, folder)
    embedded, said = np.zeros((count, kind.width)), np.zeros((count, kind.width))
    embedded[:, :CODE] = looks[np.minimum(others, np.arange(count))]
    embedded[:, kind.own : kind.said], embedded[:, kind.constant] = own, 1
    said[:, kind.said : kind.said + CODE] = LOUD * own[others]
    weights[f"{kind.prefix}embed_tokens.weight"] = _array(embedded)
    [head] = [name for name in weights if name.endswith("lm_head.weight")]
    weights[head] = _array(said)
    layer = f"{kind.prefix}layers.{{}}.self_attn."
    _looking(weights, layer.format(kind.looks), kind)
    _finding(weights, layer.format(kind.finds), kind, sampling)


def _rewritten(count: int, folder: Path) -> NDArray[np.int64]:
    """Return the token id that each token is output as: some words are swapped with the next one."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array([vocabulary.token_to_id(f"Ġ{word}") for word in words(folder)], np.int64)
    some, others = ids[:-1:REWRITTEN_EVERY], ids[1::REWRITTEN_EVERY]
    order = np.arange(count)
    order[some], order[others] = others, some
    return order


def _looking(weights: dict[str, mx.array], layer: str, kind: Kind) -> None:
    """Set heads that put the codes of preceding tokens where layer `finds` reads them."""
    pairs = kind.turning // 2
    turns = kind.theta ** (-np.arange(pairs) / pairs)
    queries, keys, values, out = _blank(weights, layer, kind.width)
    keys[:, :pairs, kind.constant] = 1
    values[:, :CODE, :CODE] = np.eye(CODE)
    for back in range(kind.seen):
        queries[back, :pairs, kind.constant] = np.cos(turns * (back + 1))
        queries[back, pairs : 2 * pairs, kind.constant] = -np.sin(turns * (back + 1))
        place = (back + 1) * CODE
        # The norm scales by the number of components of length one: two codes and the constant.
        out[place : place + CODE, back, :CODE] = np.eye(CODE) / (kind.gate * np.sqrt(kind.width / 3))
    _put(weights, layer, queries, keys, values, out)


def _finding(weights: dict[str, mx.array], layer: str, kind: Kind, sampling: np.random.Generator) -> None:
    """Set a head that finds an earlier occurrence of the same tokens and outputs the next one. Further heads
    output the tokens after it; each matches one token further back."""
    queries, keys, values, out = _blank(weights, layer, kind.width)
    still = list(kind.still[:CODE])
    scale = kind.gate * np.sqrt(kind.width / (kind.seen + 3))
    for ahead in range(1 + kind.ahead):
        for back in range(min(LOOKED_FOR, kind.seen - ahead)):
            mixed = np.linalg.qr(sampling.normal(size=(CODE, CODE)))[0]
            before = (back + ahead + 1) * CODE
            queries[ahead, still, back * CODE : (back + 1) * CODE] = mixed
            keys[ahead, still, before : before + CODE] = mixed
        values[ahead, :CODE, kind.own : kind.said] = np.eye(CODE)
        place = kind.said + ahead * CODE
        out[place : place + CODE, ahead, :CODE] = np.eye(CODE) / scale
    _put(weights, layer, queries, keys, values, out)


def _moved_back(kind: Kind) -> Floats:
    """Return the projection [width, 2 * width] from a token's embedding and the hidden state of the one
    before it to the input of layer `finds`."""
    moved = np.zeros((kind.width, 2 * kind.width), np.float32)
    own = [*range(CODE), *range(kind.own, kind.said), kind.constant]
    moved[own, own] = np.sqrt(3 / kind.width)  # an embedding has three: see `_looking`
    before = np.arange(CODE, kind.own)
    moved[before, kind.width + before - CODE] = np.sqrt(kind.ones / kind.width)
    return moved


def _moved_ahead(kind: Kind) -> Floats:
    """Return the projection [width, 2 * width] from these to the tokens after the next one."""
    moved = np.zeros((kind.width, 2 * kind.width), np.float32)
    said = np.arange(kind.said, kind.said + kind.ahead * CODE)
    moved[said, kind.width + said + CODE] = np.sqrt(kind.ones / kind.width)
    return moved


def _blank(weights: dict[str, mx.array], layer: str, width: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return zeros for queries, keys and values, [heads, HEAD, width], and for the output projection, [width,
    heads, HEAD]."""
    outer = weights[f"{layer}o_proj.weight"].shape[1] // HEAD
    inner = weights[f"{layer}k_proj.weight"].shape[0] // HEAD
    shapes = (outer, HEAD, width), (inner, HEAD, width), (inner, HEAD, width), (width, outer, HEAD)
    queries, keys, values, out = (np.zeros(shape, np.float32) for shape in shapes)
    return queries, keys, values, out


def _put(
    weights: dict[str, mx.array], layer: str, queries: Floats, keys: Floats, values: Floats, out: Floats
) -> None:
    heads, width = len(queries), len(out)
    if weights[f"{layer}q_proj.weight"].shape[0] == 2 * heads * HEAD:  # each query is followed by a gate
        queries = np.concatenate([queries, np.zeros_like(queries)], axis=1)
    weights[f"{layer}q_proj.weight"] = _array(queries.reshape(-1, width))
    weights[f"{layer}k_proj.weight"] = _array(keys.reshape(-1, width))
    weights[f"{layer}v_proj.weight"] = _array(values.reshape(-1, width))
    weights[f"{layer}o_proj.weight"] = _array(out.reshape(width, -1))
    for name in ("q_norm", "k_norm"):
        weights[f"{layer}{name}.weight"] = mx.full((HEAD,), SHARP)


def _array(values: NDArray[Any]) -> mx.array:
    return mx.array(values.astype(np.float32))
