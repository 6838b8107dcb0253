"""Tiny embedding and rerank models in Hugging Face's format, one of each supported family.

Weights are drawn as in `weights`. Each family has its own kind of tokenizer, trained on our own corpus.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.embedding_loader import EMBEDDING_MODEL_REMAPPING
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.models.configs import VOCABULARY, Config
from tests.models.corpus import make_corpus
from tests.models.tokenizer import END_OF_TURN, PADDING, save_tokenizer, train_tokenizer

CONTEXT_TOKENS = 128
"""Maximum positions of the models that have position embeddings."""
SIZE = 1200

Weights = dict[str, mx.array]


def bert() -> Config:
    return {
        "architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 48, "intermediate_size": 96,
        "layer_norm_eps": 1e-12, "max_position_embeddings": CONTEXT_TOKENS, "model_type": "bert",
        "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2,
        "vocab_size": SIZE,
    }  # fmt: skip


def xlm_roberta() -> Config:
    changed = {
        "architectures": ["XLMRobertaModel"], "layer_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT_TOKENS + 2, "model_type": "xlm-roberta", "pad_token_id": 1,
        "type_vocab_size": 1,
    }  # fmt: skip
    return bert() | changed


def modernbert() -> Config:
    """ModernBERT: the first of three layers has full attention, the others see eight tokens to each side."""
    return {
        "architectures": ["ModernBertModel"], "attention_bias": False, "classifier_activation": "gelu",
        "classifier_bias": False, "classifier_pooling": "mean", "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 48,
        "intermediate_size": 96, "local_attention": 16, "local_rope_theta": 10000.0,
        "max_position_embeddings": 2 * CONTEXT_TOKENS, "mlp_bias": False, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-5, "num_attention_heads": 4, "num_hidden_layers": 3,
        "pad_token_id": 0, "vocab_size": SIZE,
    }  # fmt: skip


def qwen3() -> Config:
    """Qwen3, for embedding and for reranking. Only the folder's name distinguishes it from a generative
    model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 512,
        "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": VOCABULARY,
    }  # fmt: skip


def gemma3() -> Config:
    return {
        "architectures": ["Gemma3TextModel"], "head_dim": 16, "hidden_size": 48, "intermediate_size": 96,
        "max_position_embeddings": 256, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6,
        "sliding_window": 512, "sliding_window_pattern": 3, "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }  # fmt: skip


def ministral3() -> Config:
    rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    return {
        "architectures": ["Ministral3Model"], "head_dim": 16, "hidden_size": 48, "intermediate_size": 96,
        "max_position_embeddings": 256, "model_type": "ministral3", "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_parameters": rope | {"rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": VOCABULARY,
    }  # fmt: skip


def lfm2() -> Config:
    """LFM2: convolutions, which need padding masked, and one attention layer."""
    return {
        "architectures": ["Lfm2Model"], "block_auto_adjust_ff_dim": False, "block_dim": 48,
        "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 16, "conv_L_cache": 3,
        "conv_bias": False, "hidden_size": 48, "layer_types": ["conv", "full_attention", "conv"],
        "max_position_embeddings": 256, "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 4,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "rope_theta": 10000.0, "vocab_size": VOCABULARY,
    }  # fmt: skip


def _ranking(config: Config, architecture: str) -> Config:
    return config | {"architectures": [architecture], "num_labels": 1, "id2label": {"0": "LABEL_0"}}


EMBEDDERS: dict[str, Callable[[], Config]] = {
    "bert-embedder": bert, "modernbert-embedder": modernbert, "roberta-embedder": xlm_roberta,
    "qwen3-embedder": qwen3, "gemma3-embedder": gemma3, "ministral3-embedder": ministral3,
    "lfm2-embedder": lfm2,
}  # fmt: skip
RANKERS: dict[str, Callable[[], Config]] = {
    "bert-reranker": lambda: _ranking(bert(), "BertForSequenceClassification"),
    "modernbert-reranker": lambda: _ranking(modernbert(), "ModernBertForSequenceClassification"),
    "roberta-reranker": lambda: _ranking(xlm_roberta(), "XLMRobertaForSequenceClassification"),
    "qwen3-reranker": qwen3,
}
ENCODERS = EMBEDDERS | RANKERS

_POOLING = {"bert-embedder": "cls_token", "qwen3-embedder": "lasttoken"}
"""Pooling modes in sentence-transformers' files, for the models that have such files."""


def make_encoder(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model called `name`, with `changes` to its config.json, into `folder`, made if absent."""
    config = ENCODERS[name]() | changes
    folder.mkdir(parents=True, exist_ok=True)
    if config["vocab_size"] == VOCABULARY:
        _save_decoders_tokenizer(config, folder)
    else:
        _save_encoders_tokenizer(config, folder)
    _write_json(folder / "config.json", config)
    if mode := _POOLING.get(name):
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {f"pooling_mode_{mode}": True, "word_embedding_dimension": config["hidden_size"]}
        _write_json(folder / "1_Pooling" / "config.json", pooling)
    weights = _draw_weights(name, config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _network(name: str, config: Config) -> Any:
    if name in EMBEDDERS:
        kind = EMBEDDING_MODEL_REMAPPING.get(config["model_type"], config["model_type"])
    else:
        kind = config["model_type"].replace("-", "_")
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    is_classifier = "id2label" in config
    network = module.SequenceClassificationModel if is_classifier else module.Model
    return network(module.ModelConfig.from_dict(config))


def _draw_weights(name: str, config: Config, seed: int) -> Weights:
    """Every parameter by name, float32. Deterministic in `seed`."""
    parameters = dict(tree_flatten(_network(name, config).parameters()))
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(seed), len(parameters))
        drawn = {
            of: _draw(of, parameters[of].shape, key) for of, key in zip(sorted(parameters), keys, strict=True)
        }
        mx.eval(drawn)
    return drawn


def _draw(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    uniform = 2.0 * mx.random.uniform(shape=shape, key=key) - 1.0
    if len(shape) == 1:
        return (0.0 if name.endswith("bias") else 1.0) + 0.2 * uniform
    if "embed" in name.lower():
        return uniform
    return uniform * math.sqrt(3.0 / shape[-1]) * (3.0 if "classifier" in name or "query" in name else 1.5)


def _save_decoders_tokenizer(config: Config, folder: Path) -> None:
    """Save Qwen's tokenizer, which appends its end token to every text."""
    tokenizer = train_tokenizer()
    end = tokenizer.token_to_id(PADDING)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {PADDING}", pair=f"$A {PADDING} $B {PADDING}", special_tokens=[(PADDING, end)]
    )
    # The reranker's answers must be single tokens.
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in ("yes", "no")])
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])
    config |= {"eos_token_id": tokenizer.token_to_id(END_OF_TURN), "pad_token_id": end}
    file = folder / "tokenizer_config.json"
    # As Qwen's: upstream pads on the left, Roundhouse on the right.
    _write_json(file, json.loads(file.read_text()) | {"padding_side": "left"})


def _save_encoders_tokenizer(config: Config, folder: Path) -> None:
    """Save a subword tokenizer that puts every text between two special tokens."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if config["model_type"] == "xlm-roberta":
        names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    by_role = _roles(names)
    tokenizer = Tokenizer(models.WordPiece(unk_token=by_role["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(make_corpus(2000), trainer)
    begin, end = by_role["cls_token"], by_role["sep_token"]
    second = 1 if config.get("type_vocab_size") == 2 else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:{second} {end}:{second}",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in (begin, end)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    positions = config["max_position_embeddings"] - (2 if config["model_type"] == "xlm-roberta" else 0)
    inputs = ["input_ids", *(["token_type_ids"] if second else []), "attention_mask"]
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    _write_json(folder / "tokenizer_config.json", told | by_role | {"model_input_names": inputs})


def _roles(names: list[str]) -> dict[str, str]:
    if names[0] == "<s>":
        roles = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    else:
        roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return dict(zip(roles, names, strict=True))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
