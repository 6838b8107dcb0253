"""Streamed text equals the whole text for any tokens, up to the first stop sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from tests.models.fixtures import model_folder
from tests.models.tokenizer import token_bytes
from worker.output.text import WINDOW_TOKENS_MAX, StopMatcher, TextProcessor, TextStream, Vocabulary

ALPHABET = [
    *"abc XYZ 0123 .,!?\n\t",
    *"é ß ñ ạ e\u0301 n\u0303\u0323 क्षि ก็ 한 글",
    *"你好世界。、東京タワー",
    *"😀🎉🏳️‍🌈👩‍👩‍👧‍👦🇯🇵\u200d\ufe0f",
    *"\ufffd\u00a0\u2028\ufeff",
    " the",
    "def main():\n    return",
    "</think>",
    "<tool_call>",
]


@cache
def byte_level() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder("dense"))


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer as in Llama 2 and Gemma: words with ▁ for a space, and 256 byte tokens."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", "▁▁", "▁the", "a", "b", "c", "X", "é", "你", "\ufffd", "▁\ufffd", "\n", "\u200d"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def vocabulary_of(backend: Tokenizer, decoder: decoders.Decoder) -> Vocabulary:
    backend.decoder = decoder
    return Vocabulary(SimpleNamespace(backend_tokenizer=backend))  # type: ignore[arg-type]


def spaces() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


FALLBACK_DECODERS: dict[str, Callable[[], decoders.Decoder]] = {
    "gemma": lambda: decoders.Sequence(spaces()),
    "llama": lambda: decoders.Sequence([*spaces(), decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace,
}


def streamed(vocabulary: Vocabulary, tokens: list[int]) -> str:
    output_processor = TextProcessor(vocabulary, ())
    return "".join(pushed(output_processor, tokens)) + output_processor.flush().text


def pushed(output_processor: TextProcessor, tokens: Iterable[int]) -> Iterator[str]:
    return (output_processor.push(token).text for token in tokens)


def spelled(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    output_processor = TextProcessor(vocabulary, ())
    return b"".join(map(output_processor.spell, tokens))


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, 30)))


def test_random_strings_stream_to_their_whole_text() -> None:
    """Half are tokenized normally; half have random ids in between: special, unknown, broken UTF-8."""
    rng = random.Random(0)
    tokenizer, vocabulary = byte_level(), Vocabulary(byte_level())
    for index in range(500):
        text = random_text(rng)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if index % 2:
            for _ in range(rng.randint(1, 8)):
                tokens.insert(rng.randint(0, len(tokens)), rng.randrange(2048))
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert streamed(vocabulary, tokens) == whole
        if index % 2 == 0:
            assert whole == text
            assert spelled(vocabulary, tokens) == text.encode()


@pytest.mark.parametrize("name", FALLBACK_DECODERS)
def test_byte_fallback_tokens_stream_and_spell_their_whole_text(name: str) -> None:
    rng = random.Random(1)
    backend = byte_fallback()
    vocabulary = vocabulary_of(backend, FALLBACK_DECODERS[name]())
    size = backend.get_vocab_size()
    for _ in range(400):
        tokens = backend.encode(random_text(rng).replace(" ", "▁")).ids
        if name == "metaspace":  # has no byte tokens
            own = [token for token in tokens if token not in vocabulary.byte_tokens]
        else:
            own = tokens
        text = backend.decode(own)
        assert spelled(vocabulary, own).decode() in (text, " " + text)  # decoders drop the first space
        for _ in range(rng.randint(0, 6)):
            place, token = rng.randint(0, len(tokens)), rng.choice([rng.randrange(size + 2), size - 1])
            tokens.insert(place, token)
        assert streamed(vocabulary, tokens) == backend.decode(tokens)
    assert vocabulary.spell(0xE4 + 1) == b"\xe4"


def test_a_valid_run_of_bytes_that_turns_out_invalid_is_never_half_given() -> None:
    backend = byte_fallback()
    vocabulary = vocabulary_of(backend, FALLBACK_DECODERS["gemma"]())
    run = [byte + 1 for byte in "你".encode()] + [0xFF + 1]
    output_processor = TextProcessor(vocabulary, ())
    assert [output_processor.push(token).text for token in run] == [""] * 4
    assert output_processor.push(backend.token_to_id("a")).text == "\ufffd" * 4 + "a"


def test_a_tokenizer_without_a_fast_backend_streams_to_its_whole_text() -> None:
    rng = random.Random(2)
    tokenizer = ByT5Tokenizer()
    vocabulary = Vocabulary(tokenizer)
    for _ in range(100):
        tokens = tokenizer.encode(random_text(rng), add_special_tokens=True)
        for _ in range(rng.randint(0, 3)):
            tokens.insert(rng.randint(0, len(tokens)), rng.randrange(259))
        assert streamed(vocabulary, tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_text_is_given_out_with_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    output_processor = TextProcessor(Vocabulary(tokenizer), ())
    for token in tokenizer.encode("What is the capital of France?"):
        assert output_processor.push(token).text == tokenizer.decode([token])
    pieces = [output_processor.push(token).text for token in tokenizer.encode("😀")]
    assert pieces[-1] == "😀"
    assert not any(pieces[:-1])
    assert output_processor.flush().text == ""


def test_a_long_run_of_broken_bytes_is_given_out_on_the_way_and_in_linear_time() -> None:
    tokenizer = byte_level()
    broken = [token for token in range(256) if tokenizer.decode([token]) == "\ufffd"]
    tokens = random.Random(3).choices(broken, k=4000)
    vocabulary = Vocabulary(tokenizer)
    decode, decoded = vocabulary.decode, list[int]()

    def counted(window: Sequence[int]) -> str:
        decoded.append(len(window))
        return decode(window)

    vocabulary.decode = counted
    stream = TextStream(vocabulary)
    given = sum(len(stream.push(token)) for token in tokens)
    assert sum(decoded) < 4 * WINDOW_TOKENS_MAX * len(tokens)
    assert len(stream.rest()) <= 2 * WINDOW_TOKENS_MAX
    assert given > 2000


def test_every_byte_level_token_is_spelled_as_its_own_bytes() -> None:
    backend = byte_level().backend_tokenizer
    vocabulary = Vocabulary(byte_level())
    expected = token_bytes(backend)
    assert [vocabulary.spell(token) for token in range(len(expected))] == expected
    assert {bytes([byte]) for byte in range(256)} <= {*expected}
    assert vocabulary.spell(len(expected)) == b""


def test_special_tokens_spell_their_names() -> None:
    assert Vocabulary(byte_level()).spell(1987) == b"<|endoftext|>"
    backend = byte_fallback()
    backend.add_special_tokens([AddedToken("<｜end▁of▁turn｜>", special=True)])
    vocabulary = vocabulary_of(backend, FALLBACK_DECODERS["gemma"]())
    assert vocabulary.spell(backend.token_to_id("<｜end▁of▁turn｜>")) == "<｜end▁of▁turn｜>".encode()
    assert vocabulary.spell(backend.token_to_id("<think>")) == b"<think>"


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reference: return the first prefix that ends in a stop sequence, without the longest such sequence."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", max_size=5), max_size=4),
    borders=st.lists(st.integers(0, 30)),
)
def test_text_is_cut_at_the_first_stop_string(text: str, stops: list[str], borders: list[int]) -> None:
    expected, matched = cut(text, stops)
    matcher = StopMatcher(stops)
    places = sorted({0, len(text), *(border for border in borders if border < len(text))})
    given_out = ""
    for start, end in itertools.pairwise(places):
        given_out += matcher.push(text[start:end])
        # All certain text is out: held-back text begins a stop sequence.
        held = text[len(given_out) : end]
        if not matcher.matched and held:
            assert any(stop.startswith(held) for stop in stops)
    assert given_out + matcher.rest() == expected
    assert matcher.matched == matched
    # The reported sequence is the one at the end of the text.
    assert text.startswith(expected + matcher.found)
    assert matcher.found in (stops if matched else [""])
