"""Calls with one small fault: whatever upstream's parser still reads as intended, ours reads too."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.worker.output.calls.parsed_answers import either_way, in_pieces, schemas_in
from tests.worker.output.calls.written import FORMATS, Arguments, Call, Format, schema_of

ARGUMENTS: Arguments = {"content": "if x:\n    return 'a, b'", "count": 12, "force": True}
INTENDED: Call = ("write", ARGUMENTS)
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": schema_of(ARGUMENTS)}},
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},
]
PIECES = [
    re.compile(r"<\|\"\|>|<\|?/?[\w|:]+\|?|[ \t]+|\w+|[^\w\s]|\n"),
    re.compile(r"<[^<>]*>|\"[^\"]*\"|[ \t]+|[\w]+|[^\w\s]|\n"),
]
"""Small and large pieces of a written call."""
SPELLINGS = [
    ('"', "'"), ("'", '"'), ("true", "True"), ("True", "true"), ("12", "12.0"), ("12", '"12"'),
    ("12", " 12 "), (">", " >"), (">", ">\n\n"), ("<", "\n <"), (":", " : "), ("=", " = "), (",", " , "),
    ("functions.", ""), (":3", ""), (":3", ":a"), ("{", "{ "), ("}", " }"), ("[", "[ "), ("]", " ]"),
    ("(", "( "), (")", ",)"), ("}", ",}"), ("\\n", "\n"),
]  # fmt: skip
"""What models write for each other."""

DROPPED = ("</atem : invoke>", '<|sep|>"1"')
"""What is no scrap of a tag: upstream drops it, and any other text in its place."""


def mutated(text: str) -> Iterator[str]:
    """Yield a text with one piece left out, doubled, moved behind the next, or spelled otherwise."""
    for pattern in PIECES:
        found = list(pattern.finditer(text))
        for one, two in zip(found, [*found[1:], None], strict=True):
            before, behind = text[: one.start()], text[one.end() :]
            yield before + behind
            yield before + one[0] * 2 + behind
            if two is not None:
                yield before + text[one.end() : two.end()] + one[0] + text[two.end() :]
    for old, new in SPELLINGS:
        yield text.replace(old, new)
        for place in re.finditer(re.escape(old), text):
            yield text[: place.start()] + new + text[place.end() :]


def by_upstream(form: Format, text: str) -> list[Call]:
    """Return the calls of upstream's server."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{form.parser}")
    start, end = module.tool_call_start, module.tool_call_end
    calls: list[Call] = []
    while start in text:
        body, _, text = text.partition(start)[2].partition(end) if end else (text.partition(start)[2], "", "")
        with suppress(Exception):
            parsed = module.parse_tool_call(body, TOOLS)
            calls += [(c["name"], c["arguments"]) for c in (parsed if isinstance(parsed, list) else [parsed])]
    return calls


def is_intended(calls: list[Call]) -> bool:
    """Return whether these are the intended call alone. White space around strings is left to each parser."""
    if len(calls) != 1 or calls[0][0] != INTENDED[0] or not isinstance(calls[0][1], dict):
        return False
    return {key: typed(key, value) for key, value in calls[0][1].items()} == {
        key: typed(key, value) for key, value in ARGUMENTS.items()
    }


def typed(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return (type(value), value)
    if key == "content":
        return value.strip()
    try:
        return (type(json.loads(value)), json.loads(value))
    except ValueError:
        return value


def upstream_alone(form: Format) -> list[str]:
    """Return the texts whose call upstream alone reads."""
    alone = []
    for text in sorted({*mutated(form.write([INTENDED]))}):
        said = in_pieces(schemas_in(TOOLS), [text], has_ended=True)
        size = 1 + len(text) % 7
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert in_pieces(schemas_in(TOOLS), pieces, has_ended=True) == said
        read = said.parsed() if len(said.whole) == len(said.calls) else []
        if is_intended(by_upstream(form, text)) and not is_intended(read):
            alone.append(text)
    return alone


@pytest.mark.parametrize("name", FORMATS)
def test_what_upstream_reads_in_spite_of_a_fault_is_read(name: str) -> None:
    alone = upstream_alone(FORMATS[name])
    assert [text for text in alone if not any(part in text for part in DROPPED)] == []


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *(("qwen3_coder", "</parameter>"), ("minimax_m2", "</parameter>"), ("glm47", "</arg_value>")),
        *(("longcat", "</longcat_arg_value>"), ("muse_spark", "</atem:parameter>")),
        ("kimi_k3", "<|close|>argument<|sep|>"),
    ],
)
def test_a_value_without_its_end_ends_where_another_argument_of_the_tool_begins(name: str, end: str) -> None:
    for count in (1, 2):
        text = FORMATS[name].write([INTENDED]).replace(end, "", count)
        said = either_way(schemas_in(TOOLS), text)
        assert (is_intended(said.parsed()), said.whole) == (True, [0])
