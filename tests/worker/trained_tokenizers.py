"""Small tokenizers of the kinds that models have, trained on a few lines."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The 4:50 from Paddington - platform 7 - is late; 駅はどこ? 🚂",
    "def station(name: str) -> Track:\n    return tracks[name]  # the first one",
    "Ein Zug fährt über die Brücke, während es schneit. " + "=" * 40,
] * 20
SIZE = 600
KINDS = ("byte-level", "byte-level nfc", "byte fallback", "unigram", "wordpiece")


@cache
def trained(kind: str) -> Tokenizer:
    """Return a tokenizer of one of `KINDS`."""
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer: Any = trainers.UnigramTrainer(vocab_size=SIZE, unk_token="<unk>", special_tokens=["<unk>"])
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=["[UNK]"])
    elif kind == "byte fallback":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=SIZE + 256, special_tokens=names, limit_alphabet=60)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC() if kind.endswith("nfc") else None
        split = pre_tokenizers.Split(Regex(r"\s+|[^\s]+"), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=letters)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
