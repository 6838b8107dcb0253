"""Unread output: what a template writes of an answer, but the model's output format does not find in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.input.prompts.boundaries import Messages
from worker.input.prompts.format import opening_of
from worker.input.prompts.template import Template, attempt
from worker.input.prompts.wants import CALLED, HIDDEN, THOUGHT, TOOL, TOOL_NAME, USER, Tools
from worker.interfaces import OutputProcessor
from worker.output.calls.schemas import Schema
from worker.output.channels import CONTENT

PROBED_TOOLS: dict[str, Schema] = {f"{TOOL_NAME}_0": {}}
Kind = Literal["tool_calls", "reasoning"]
Open = Callable[[str, bool], OutputProcessor]
"""Opens the processor of an answer that begins in a state; with the probe's tools, or without."""


def unread(template: Template, tokenizer: TokenizerWrapper, open: Open) -> list[Kind]:
    """Return the kinds of output that clients would get as text."""
    kinds: list[Kind] = []
    written = not template.wants.writes_calls and TOOL_NAME in attempt(template, [USER], [TOOL])
    if written and not _finds(template, tokenizer, open, [CALLED[0]], tools=[TOOL]):
        kinds.append("tool_calls")
    calling = {**CALLED[0], "reasoning_content": THOUGHT}
    if not all(_finds(template, tokenizer, open, said) for said in ([HIDDEN], [calling, CALLED[1]])):
        kinds.append("reasoning")
    return kinds


def _finds(
    template: Template, tokenizer: TokenizerWrapper, open: Open, said: Messages, tools: Tools | None = None
) -> bool:
    """Return whether the call (with `tools`) or the thought of an answer is found, if it is written."""
    rendered = attempt(template, [USER, *said], tools, opens_turn=False)
    wanted = "value-0" if tools else THOUGHT
    if wanted not in rendered:
        return True
    turns = [(rendered.rpartition(str(USER["content"]))[2], CONTENT)]
    prompt = attempt(template, [USER], tools)
    if prompt and rendered.startswith(prompt):
        opening = opening_of(tokenizer, prompt, lambda: attempt(template, [USER], tools, opens_turn=False))
        turns.append((rendered.removeprefix(prompt), opening))
    return any(_is_read(tokenizer, open(state, bool(tools)), text, wanted) for text, state in turns)


def _is_read(tokenizer: TokenizerWrapper, processor: OutputProcessor, text: str, wanted: str) -> bool:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    deltas = [*map(processor.push, tokens), processor.flush(has_ended=True)]
    return wanted not in "".join(delta.text for delta in deltas)
