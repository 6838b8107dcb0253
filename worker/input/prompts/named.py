"""Formats that an operator names: what the parsers of other servers read, as data.

All known formats of calls are recognized in any case (`worker.output.calls.formats`). A named one is also
that of calls which a grammar forces, and is recognized within reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.settings.parsers import CallParser, NamedParsers, ReasoningParser
from worker.output.channels import REASONING

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
