"""Upper bound of the bytes of text that one token stands for, by which the gateway refuses what cannot fit.

The bound must be safe: a text of `n` bytes, apart from white space, has at least `n / bound` tokens. It is
known only for tokenizers that keep every byte: BPE over bytes, or with a token for every byte, behind a
normalizer and a pre-tokenizer that drop nothing but white space. Others map unknown text of any length to one
token, or remove accents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

NFC_SHRINK_MAX = 4
"""Maximum factor by which NFC shortens a text in UTF-8: ΐ (2 bytes) may be written with 7 bytes."""
_BLANKS = str.maketrans("", "", "ĠĊĉčċČ")
"""Removes space, line feed, tab, carriage return, vertical tab and form feed from byte-level tokens."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}
"""Pre-tokenizers that keep all text. `Split` and `Punctuation` do unless they remove what they find."""


def token_bytes_max(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the bound of a Hugging Face tokenizer; 0: unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return 0
    parts: Mapping[str, Any] = json.loads(backend.to_str())
    normalizers, splitters = (list(_flat(parts.get(name))) for name in ("normalizer", "pre_tokenizer"))
    shrink = _shrink(normalizers)
    if not shrink or not all(map(_keeps, splitters)) or parts.get("truncation"):
        return 0
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if parts["model"].get("type") != "BPE":
        return 0
    if any(splitter["type"] == "ByteLevel" for splitter in splitters):
        is_complete = all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())
        sizes = [len(piece.translate(_BLANKS)) for piece in vocabulary]
    else:
        is_complete = parts["model"].get("byte_fallback") and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(256)
        )
        sizes = [len(piece.encode(errors="replace")) for piece in vocabulary]
    added = [len(token["content"].encode(errors="replace")) for token in parts.get("added_tokens", ())]
    return shrink * max(sizes + added) if is_complete else 0


def _flat(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence, or the part itself."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for each in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _flat(each)


def _shrink(normalizers: list[Mapping[str, Any]]) -> int:
    """Return the maximum factor by which normalizers shorten a text; 0: unknown."""
    factor = 1
    for each in normalizers:
        if each["type"] == "NFC":
            factor *= NFC_SHRINK_MAX
        elif each["type"] == "Replace" and each.get("pattern") == {"String": " "}:
            continue  # whatever it becomes, white space is not counted
        elif each["type"] != "Prepend":
            return 0
    return factor


def _keeps(splitter: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer keeps all text."""
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter.get("behavior") != "Removed")
    return splitter["type"] in _KEEPING
