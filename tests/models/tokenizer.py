"""A byte-level BPE tokenizer of 2,000 entries in Qwen's style, trained on our own corpus."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.models.corpus import make_corpus
from worker.pocket import MODEL_PATH

SIZE = 2000
"""Entries in the vocabulary, including added tokens: ids 0 to 1999."""

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"

# In Qwen's order, at the end of the vocabulary. True: special, dropped by `skip_special_tokens`.
ADDED_TOKENS: dict[str, bool] = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<|vision_start|>": True,
    "<|vision_end|>": True, "<|image_pad|>": True, "<|video_pad|>": True, "<tool_call>": False,
    "</tool_call>": False, "<tool_response>": False, "</tool_response>": False, "<think>": False,
    "</think>": False,
}  # fmt: skip

# How Qwen3.5 splits text into words. transformers replaces the file's own pattern with this one for
# `model_type: qwen3_5`, so training with any other would leave merges that no encoding can reach.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_OPENED = re.compile(r"    \{#- As with the small Qwen3\.5.*?-#\}\n.*?\n.*?\n", re.DOTALL)
_CLOSED = """\
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
"""
TEMPLATE = _OPENED.sub(lambda _: _CLOSED, (MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8"))
"""The pocket model's, except that a model that is to think opens its thoughts itself, as Qwen3 does."""


def train_tokenizer(normalize: bool = False) -> Tokenizer:
    """Train the tokenizer. Every call returns a new object with identical contents.

    `normalize`: apply Unicode NFC before encoding, as Qwen's own tokenizers do. Decoding is exact either way.
    """
    return Tokenizer.from_str(_trained(normalize))


@cache
def _trained(normalize: bool) -> str:
    """Train the tokenizer. Takes most of the time of making a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalize:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_corpus(), trainer)
    tokenizer.add_tokens([_added(token) for token in ADDED_TOKENS])
    return str(tokenizer.to_str())


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as `AutoTokenizer` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_config(tokenizer, context_tokens), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token, indexed by id. An added token's are its name in UTF-8."""
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    ids = tokenizer.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)
    return [piece.encode() if piece in ADDED_TOKENS else bytes(byte_of[c] for c in piece) for piece in pieces]


def _byte_characters() -> list[str]:
    """Return the printable stand-in of each byte, 0 to 255, in GPT-2's scheme."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=ADDED_TOKENS[token])


def _config(tokenizer: Tokenizer, context_tokens: int) -> dict[str, Any]:
    described = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": special,
        }
        for token, special in ADDED_TOKENS.items()
    }  # fmt: skip
    return {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": described,
        "additional_special_tokens": [token for token, special in ADDED_TOKENS.items() if special],
        "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": END_OF_TURN,
        "errors": "replace", "model_max_length": context_tokens, "pad_token": PADDING,
        "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
    }  # fmt: skip
