"""Markers that upstream does not guess, and formats that an operator names, as data.

A family is a row here. `complete` gives the tokenizer the markers of its vocabulary, so that everything that
asks it (budgets, grammars, openings) knows them as it knows upstream's own.

All known formats of calls are recognized in any case (`worker.output.calls.formats`). A named one is also
that of calls which a grammar forces, and is recognized within reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.settings.parsers import CallParser, NamedParsers, ReasoningParser
from worker.output.channels import CONTENT, REASONING

Edges = Mapping[str, tuple[tuple[str, str], ...]]

THOUGHTS = (
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""What begins and ends reasoning, where both are tokens."""
PLAIN_THOUGHTS = (
    ("<think>", "</think>"),  # Nemotron Nano, and models trained on answers of others
    ("◁think▷", "◁/think▷"),  # Kimi-Dev
)
"""The same as plain text. Such a marker counts at the beginning of an answer alone: elsewhere it is cited."""
STRUCTURE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Tokens around content, which clients do not see."""

HARMONY_HEAD = "harmony head"
"""State between the messages of an answer in OpenAI's harmony format: a channel and a recipient come next."""
HARMONY_THOUGHT = "<|channel|>analysis<|message|>"
HARMONY_CALL = "to=functions."
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_ANALYSIS, _CHANNEL = "harmony analysis", "harmony channel"
_HARMONY: Edges = {
    HARMONY_HEAD: (("<|channel|>", _CHANNEL), ("<|message|>", CONTENT), ("<|start|>assistant", HARMONY_HEAD)),
    _CHANNEL: (("analysis", _ANALYSIS), ("<|message|>", CONTENT)),
    _ANALYSIS: (("<|message|>", REASONING),),
    REASONING: (("<|end|>", HARMONY_HEAD), ("<|start|>assistant", HARMONY_HEAD)),
    CONTENT: (
        *(("<|end|>", HARMONY_HEAD), ("<|start|>assistant", HARMONY_HEAD)),
        *(("<|return|>", CONTENT), ("<|call|>", HARMONY_HEAD)),
        ("<|channel|>", _CHANNEL),  # the head is left out by a grammar, and by some models
    ),
}
HARMONY_HEADS = (HARMONY_HEAD, _CHANNEL, _ANALYSIS)
"""States in which a recipient may be named."""

_KINDS: Mapping[CallParser, str] = {
    "ernie45": "json_tools",
    "functiongemma": "function_gemma",
    "gemma4": "gemma4",
    "glm45": "glm47",
    "glm47": "glm47",
    "granite4": "json_tools",
    "hermes": "json_tools",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "lfm2": "pythonic",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "qwen": "json_tools",
    "qwen25": "json_tools",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
"""Upstream's parser for the same format. Others have none: they are recognized, and a grammar forces what the
template writes, or else Hermes's format."""
_MARKERS: Mapping[ReasoningParser, tuple[str, str]] = {
    "command_a": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_THINK = ("<think>", "</think>")
"""Those of all others, apart from harmony's, which are known by their tokens."""
_BEGIN_IN_REASONING = frozenset(["deepseek_r1", "minimax_m2", "nemotron_v3", "step3"])
"""Parsers for which an answer begins in reasoning, also without a start."""


def complete(tokenizer: TokenizerWrapper) -> TokenizerWrapper:
    """Give a tokenizer the markers of reasoning in its vocabulary, if upstream has found none."""
    if tokenizer.has_thinking or is_harmony(tokenizer):
        return tokenizer
    vocabulary = tokenizer.get_vocab()
    for start, end in _known(tokenizer):
        tokenizer._think_start, tokenizer._think_end = start, end
        tokenizer._think_start_tokens = (vocabulary[start],)
        tokenizer._think_end_tokens = (vocabulary[end],)
        break
    return tokenizer


def is_harmony(tokenizer: TokenizerWrapper) -> bool:
    """Return whether the model answers in OpenAI's harmony format (gpt-oss)."""
    vocabulary = tokenizer.get_vocab()
    return all(token in vocabulary for token in _HARMONY_TOKENS)


def harmony_opening(prompt: str) -> str:
    """Return the state in which the answer to a rendered conversation begins."""
    _, found, turn = prompt.rpartition("<|start|>assistant")
    if not found:
        return CONTENT
    _, channel, said = turn.rpartition("<|channel|>")
    if "<|message|>" not in turn:
        return HARMONY_HEAD if not channel else _ANALYSIS if said.startswith("analysis") else _CHANNEL
    return REASONING if said.startswith("analysis") else CONTENT


def transitions(tokenizer: TokenizerWrapper) -> Iterator[tuple[str, str, str]]:
    """Yield state, marker and next state of all markers that upstream does not know."""
    if is_harmony(tokenizer):
        for state, leaving in _HARMONY.items():
            for marker, then in leaving:
                yield state, marker, then
    for start, end in _known(tokenizer):
        yield CONTENT, start, REASONING
        yield REASONING, start, REASONING
        yield REASONING, end, CONTENT
        yield CONTENT, end, CONTENT
    vocabulary = tokenizer.get_vocab()
    for marker in STRUCTURE:
        if marker in vocabulary:
            yield CONTENT, marker, CONTENT
            yield REASONING, marker, CONTENT
    if has_plain_thoughts(tokenizer):
        for _, end in PLAIN_THOUGHTS:
            yield REASONING, end, CONTENT


def has_plain_thoughts(tokenizer: TokenizerWrapper) -> bool:
    """Return whether reasoning may be told by plain text: upstream knows no markers of the model."""
    has_states = tokenizer.response_initial_state is not None or is_harmony(tokenizer)
    is_ours = tokenizer.think_start in dict(THOUGHTS)
    return not has_states and (is_ours or not tokenizer.has_thinking)


def thoughts_of(tokenizer: TokenizerWrapper) -> Iterator[tuple[str, str]]:
    """Yield what begins and ends reasoning, also as plain text, for what a prompt may end with."""
    if tokenizer.has_thinking:
        yield tokenizer.think_start, tokenizer.think_end
    if has_plain_thoughts(tokenizer):
        yield from PLAIN_THOUGHTS


def _known(tokenizer: TokenizerWrapper) -> Iterator[tuple[str, str]]:
    vocabulary = tokenizer.get_vocab()
    for start, end in THOUGHTS:
        if start in vocabulary and end in vocabulary:
            yield start, end


def apply(tokenizer: TokenizerWrapper, parsers: NamedParsers) -> TokenizerWrapper:
    """Give a tokenizer the markers of the named formats, in place of those that were found."""
    if kind := _KINDS.get(parsers.calls) if parsers.calls else None:
        module = import_module(f"mlx_lm.tool_parsers.{kind}")
        tokenizer._tool_parser = module.parse_tool_call
        tokenizer._tool_call_start, tokenizer._tool_call_end = module.tool_call_start, module.tool_call_end
        tokenizer._tool_call_start_tokens = _encoded(tokenizer, module.tool_call_start)
        tokenizer._tool_call_end_tokens = _encoded(tokenizer, module.tool_call_end)
    if parsers.reasoning not in (None, "openai_gptoss"):
        start, end = _MARKERS.get(parsers.reasoning, _THINK)
        tokenizer._think_start, tokenizer._think_end = start, end
        tokenizer._think_start_tokens = _encoded(tokenizer, start)
        tokenizer._think_end_tokens = _encoded(tokenizer, end)
        if parsers.reasoning in _BEGIN_IN_REASONING:
            tokenizer._response_format = {**tokenizer._response_format, "initial_state": REASONING}
    return tokenizer


def _encoded(tokenizer: TokenizerWrapper, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
