"""Streamed channels, split anywhere, against upstream's state machine over the whole text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.worker.output.calls.parsed_answers import bare_tokenizer
from worker.input.prompts.format import Format
from worker.interfaces import OutputProcessor
from worker.output.channels import CONTENT, REASONING, SIGNS_MAX, ChannelProcessor, signs_of
from worker.output.text import Vocabulary
from worker.values import OutputDelta

MARKERS = {
    "ordinary": ("<think>", "</think>"),  # as Qwen3's: added, and not special
    "special": ("<think>", "</think>"),
    "several": ("<|channel>thought", "<channel|>"),  # as Gemma 4's
    "structural": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # as Kimi K3's
}
SPECIAL = {
    "ordinary": ["<|end|>"],
    "special": ["<|end|>", "<think>", "</think>"],
    "several": ["<|end|>", "<|channel>", "<channel|>"],
    "structural": ["<|end|>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
}
KINDS = list(MARKERS)
WORDS = [
    *["Quito", " is", " the capital.", "\n\n", "\n", "你好世界", "é", "e\u0301", "👩‍👩‍👧‍👦", "🇯🇵", "\ufffd"],
    *["<", ">", "</", "<<<", "<thi", "</thi", "nk>", "think", '{"a": "<b>"}', "`<`", "<|", "|>"],
    *["<|op", "en|>", "<channel", "<|channel", "thought", "x < y > z", '"quoted \\" brace}"'],
]


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its markers, and the parts of which texts are made."""

    tokenizer: TokenizerWrapper
    vocabulary: Vocabulary
    form: Format
    start: str
    end: str

    def open(self, state: str = CONTENT, stop: Sequence[str] = ()) -> OutputProcessor:
        return ChannelProcessor(self.vocabulary, self.form.open(state), self.form.signs, stop)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def spelled_out(self, text: str) -> list[int]:
        """Return one token per byte, so that no marker is a token of its own."""
        return [_byte_tokens()[byte] for byte in text.encode()]

    def whole(self, tokens: Iterable[int]) -> str:
        """Return the whole text, with stand-in characters for the special tokens of markers."""
        runs: list[list[int]] = [[]]
        text = ""
        for token in tokens:
            if token in self.form.signs.of:
                text += self.vocabulary.decode(runs[-1]) + self.form.signs.of[token]
                runs.append([])
            else:
                runs[-1].append(token)
        return text + self.vocabulary.decode(runs[-1])

    def named(self, text: str) -> str:
        """Replace the stand-in characters by the names of their special tokens."""
        for token, sign in self.form.signs.of.items():
            text = text.replace(sign, self.vocabulary.spell(token).decode())
        return text


@cache
def _byte_tokens() -> dict[int, int]:
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer()))
    return {vocabulary.spell(token)[0]: token for token in range(300) if len(vocabulary.spell(token)) == 1}


@cache
def kind(name: str) -> Kind:
    backend = bare_tokenizer()
    if name == "ordinary":
        backend.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS[name]])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[name]])
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))
    vocabulary = Vocabulary(tokenizer._tokenizer)
    assert (tokenizer.think_start, tokenizer.think_end) == MARKERS[name]
    return Kind(tokenizer, vocabulary, Format(tokenizer, vocabulary), *MARKERS[name])


def said(output_processor: OutputProcessor, tokens: Sequence[int]) -> list[OutputDelta]:
    return [*map(output_processor.push, tokens), output_processor.flush(has_ended=True)]


def joined(growths: Iterable[OutputDelta]) -> tuple[str, str]:
    """Return the reasoning and the content."""
    growths = list(growths)
    return "".join(growth.reasoning for growth in growths), "".join(growth.text for growth in growths)


def by_upstream(tokenizer: TokenizerWrapper, text: str, state: str = CONTENT) -> tuple[str, str]:
    machine = make_text_state_machine(tokenizer).make_state(state)
    machine, segments = TextStateMachine.split(machine, text)
    _, held, last = TextStateMachine.flush(machine)
    segments.append((last, held))
    return (
        "".join(text for state, text in segments if state == REASONING),
        "".join(text for state, text in segments if state != REASONING),
    )


def by_splitting(it: Kind, text: str, state: str = CONTENT) -> tuple[str, str]:
    """Reference: remove every marker anywhere, and then the stand-in characters outside markers."""
    names = {it.vocabulary.spell(token).decode(): sign for token, sign in it.form.signs.of.items()}
    markers = [it.start, it.end, *it.tokenizer.structural_markers]
    named = "|".join(map(re.escape, names)) or "(?!)"
    signed = [re.sub(named, lambda match: names[match[0]], marker) for marker in markers]
    parts = re.split("(" + "|".join(map(re.escape, [*markers, *signed])) + ")", text)
    channels = {REASONING: "", CONTENT: ""}
    for part in parts:
        if part in (*markers[:2], *signed[:2]):
            state = REASONING if part in (markers[0], signed[0]) else CONTENT
        elif part not in (*markers, *signed):
            channels[state] += re.sub("[\ud800-\udfff]", "", part)
    return channels[REASONING], channels[CONTENT]


texts = st.lists(st.sampled_from(WORDS) | st.text("ab<>/think|\n 你😀", max_size=6), max_size=8).map("".join)
names = st.sampled_from(KINDS)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str, list[int]]:
    """Draw a kind, an initial state, and an answer's tokens, cut anywhere: markers anywhere, as tokens or
    spelled out, and any other tokens between."""
    name = draw(names)
    it = kind(name)
    state = draw(st.sampled_from([CONTENT, REASONING]))
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        part = draw(texts | st.sampled_from([it.start, it.end, *it.tokenizer.structural_markers]))
        tokens += it.spelled_out(part) if draw(st.booleans()) else it.encode(part)
        tokens += draw(st.lists(st.integers(0, len(it.tokenizer) + 2), max_size=2))
    return name, state, tokens[: draw(st.integers(0, len(tokens)) | st.just(len(tokens)))]


# --- against the whole ---------------------------------------------------------------------------------


@given(answers())
def test_streamed_channels_are_those_of_the_whole_text(answer: tuple[str, str, list[int]]) -> None:
    name, state, tokens = answer
    it = kind(name)
    growths = said(it.open(state), tokens)
    assert joined(growths) == by_splitting(it, it.whole(tokens), state)


def test_a_marker_of_several_tokens_that_is_cut_is_no_text() -> None:
    it = kind("several")
    tokens = [48, 84, 283, 78, 1988, 487]  # Quito<|channel>th
    assert joined(said(it.open(CONTENT), tokens)) == ("", "Quitoth")
    cut = it.open(CONTENT)
    assert joined([*map(cut.push, tokens), cut.flush()]) == ("", "Quito")


@given(name=names, parts=st.lists(texts, min_size=1, max_size=5), plain=st.booleans(), state=st.booleans())
def test_alternating_markers_are_upstreams(name: str, parts: list[str], plain: bool, state: bool) -> None:
    it = kind(name)
    opening = REASONING if state else CONTENT
    markers = [it.end, it.start] if state else [it.start, it.end]
    text = parts[0]
    for place, part in enumerate(parts[1:]):
        text += markers[place % 2] + part
    tokens = it.spelled_out(text) if plain else it.encode(text)
    expected = by_upstream(it.tokenizer, it.named(it.whole(tokens)), opening)
    if by_splitting(it, it.whole(tokens), opening) == expected:  # no marker was formed from two neighbours
        assert joined(said(it.open(opening), tokens)) == expected


@given(answers())
@settings(max_examples=50)
def test_an_answer_resumed_at_any_token_goes_on_as_it_would_have(answer: tuple[str, str, list[int]]) -> None:
    name, state, tokens = answer
    it = kind(name)
    first = it.open(state)
    undisturbed = said(first, tokens)
    for place in range(len(tokens) + 1):
        second = it.open(state)
        for token in tokens[:place]:
            second.push(token)
        assert said(second, tokens[place:]) == undisturbed[place:]
        assert second.reasoning_tokens == first.reasoning_tokens


@given(answers(), st.lists(st.sampled_from(["<", "nk>", "a", "\n\n", "Quito", "你"]), min_size=1, max_size=3))
def test_stop_strings_count_in_the_content_alone(answer: tuple[str, str, list[int]], stop: list[str]) -> None:
    name, state, tokens = answer
    it = kind(name)
    output_processor = it.open(state, stop)
    growths = []
    for token in tokens:
        growths.append(output_processor.push(token))
        if output_processor.stopped:
            break
    growths.append(output_processor.flush(has_ended=True))
    thoughts, content = joined(growths)
    all_thoughts, all_content = by_splitting(it, it.whole(tokens), state)
    ends = [all_content.find(each) + len(each) for each in stop if each in all_content]
    assert output_processor.stopped == bool(ends)
    assert output_processor.stop_string in (stop if ends else [""])
    if ends:
        assert all_content.startswith(content + output_processor.stop_string)
        assert all_content.startswith(content)
        assert not any(each in content for each in stop)
        assert all_thoughts.startswith(thoughts)
    else:
        assert (thoughts, content) == (all_thoughts, all_content)


# --- single cases --------------------------------------------------------------------------------------


def test_no_more_is_held_back_than_may_become_a_marker() -> None:
    """Upstream's machine holds back a whole run of `<`."""
    it = kind("ordinary")
    output_processor = it.open()
    given_out = "".join(output_processor.push(token).text for token in it.spelled_out("<" * 100))
    assert len(given_out) > 100 - len(it.end)
    assert given_out + output_processor.flush().text == "<" * 100


@pytest.mark.parametrize("name", KINDS)
def test_thoughts_are_counted_without_their_markers_and_only_content_has_likelihoods(name: str) -> None:
    it = kind(name)
    hidden, content = it.encode("Hm, well"), it.encode("Yes")
    output_processor = it.open(REASONING)
    growths = [output_processor.push(token) for token in [*hidden, *it.encode(it.end), *content]]
    marker = len(it.encode(it.end))
    assert output_processor.reasoning_tokens == len(hidden) + marker - 1
    likely = [growth.is_content for growth in growths]
    assert likely == [False] * (len(hidden) + marker) + [True] * len(content)


@pytest.mark.parametrize("plain", [False, True])
def test_a_format_of_headers_is_followed_as_upstream_describes_it(plain: bool) -> None:
    """In Muse Spark's format, whose answers begin with their recipient."""
    backend = bare_tokenizer()
    names = ["<|message|>", "<|eom|>", "<|eot|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = TokenizerWrapper(inner, response_format=RESPONSE_FORMAT)
    vocabulary = Vocabulary(inner)
    it = Kind(tokenizer, vocabulary, Format(tokenizer, vocabulary), "", "")
    text = "to=self<|message|>\nHm<|eom|>to=user<|message|>Yes, to=self.<|eot|>"
    opening = tokenizer.response_initial_state
    assert opening is not None
    growths = said(it.open(opening), it.spelled_out(text) if plain else it.encode(text))
    assert joined(growths) == by_upstream(tokenizer, text, opening) == ("\nHm", "Yes, to=self.")


def test_there_are_only_so_many_signs() -> None:
    assert len(set(signs_of(range(SIGNS_MAX)).values())) == SIGNS_MAX
    with pytest.raises(ValueError, match="special tokens"):
        signs_of(range(SIGNS_MAX + 1))
