"""The tokenizer: byte-level BPE of 2,000 entries, in which a word has the same tokens wherever it occurs.

Qwen's pattern joins a leading space, quote or underscore to a word. Merges across that boundary would make `
Brest` in a question and `"Brest` in a tool's arguments unrelated tokens. A model this small must copy one to
the other, so no merge crosses the boundary, except for the most frequent small words after a space.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from recipes.pocket.dialogue import prompt_text
from recipes.pocket.fillers import SCRIPTS, Fillers
from recipes.pocket.synthesize import draw_dialogue
from tests.models.corpus import make_corpus
from tests.models.tokenizer import _WORDS, ADDED_TOKENS, SIZE, _added, _config

SPACED_WORDS = 160
_SPACE = "Ġ"
_SEAMS = r"[\p{L}\p{M}]+|\p{N}| |[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+"
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def make_tokenizer(folder: Path, context_tokens: int, seed: int = 0) -> Any:
    """Train the tokenizer, write its files with the chat template into `folder`, and return it as loaded by
    transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    # Dialogues are rendered with a tokenizer; the first one is trained on the corpus alone.
    _write(_train(make_corpus()), folder, context_tokens)
    texts = make_corpus() + _dialogues(AutoTokenizer.from_pretrained(folder), seed)
    _write(_train(texts), folder, context_tokens)
    return AutoTokenizer.from_pretrained(folder)


def text_pieces(tokenizer: Any) -> tuple[str, ...]:
    """Return texts that contain every token, in the order of the vocabulary, except those that mark a turn.

    A token that is text is returned itself; for one that is a part of a character, a few texts that contain
    it.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    examples = _examples(tokenizer)
    pieces: dict[str, None] = {}
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if token in special or {"<", "|"} & set(text):
            continue
        pieces |= dict.fromkeys(examples[token] if "\ufffd" in text else [text])
    return tuple(piece for piece in pieces if piece.strip() and piece.isprintable())


def _examples(tokenizer: Any, texts: int = 40_000, most: int = 4) -> dict[int, list[str]]:
    """Return for each token the shortest of many texts that contain it."""
    fill = Fillers(random.Random(0))
    drawn = {fill.script(fill.pick(SCRIPTS), fill.pick((2, 3, 6))) for _ in range(texts)}
    found: dict[int, list[str]] = defaultdict(list)
    for text in sorted(drawn, key=lambda text: (len(text), text)):
        for token in set(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids):
            if len(found[token]) < most:
                found[token].append(text)
    return found


def _dialogues(tokenizer: Any, seed: int, count: int = 3000) -> list[str]:
    dialogues = (draw_dialogue(f"tokenizer {seed} {index}", "mixed") for index in range(count))
    return [prompt_text(dialogue, tokenizer) + dialogue.target for dialogue in dialogues]


def _train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SEAMS), behavior="isolated"), byte_level]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(ADDED_TOKENS) - SPACED_WORDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_spaced_words(tokenizer, texts)


def _with_spaced_words(tokenizer: Tokenizer, texts: list[str]) -> Tokenizer:
    """Add a token ` word` for each of the most frequent lower-case words that are one token, after all other
    merges."""
    state = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    counts: Counter[str] = Counter()
    for text in random.Random(0).sample(texts, 4000):
        counts.update(word for word in text.split(" ")[1:] if word.isascii() and word.islower())
    common = [word for word, _ in counts.most_common() if len(word) > 1 and word in vocabulary]
    for word in common[:SPACED_WORDS]:
        vocabulary[_SPACE + word] = len(vocabulary)
        state["model"]["merges"].append([_SPACE, word])
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": _WORDS}
    finished: Tokenizer = Tokenizer.from_str(json.dumps(state))
    finished.decoder = decoders.ByteLevel()
    finished.add_tokens([_added(token) for token in ADDED_TOKENS])
    assert finished.get_vocab_size() == SIZE
    return finished


def _write(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_config(tokenizer, context_tokens), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
