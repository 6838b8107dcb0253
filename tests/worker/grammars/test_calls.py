"""Tool calls drawn from their grammars are parsed by upstream's parsers and have valid arguments."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.worker.grammars.sampling import Words, draw, small, words_of
from tests.worker.input.prompts.test_markup import HARMONY, answer, tokenizer_with
from worker.grammars.calls import STYLES, CallForm, CallsGrammar, ToolSchema
from worker.grammars.references import SchemaError
from worker.input.prompts.markup import HARMONY_CALL

PLACE = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 16},
        "note": {"type": ["string", "null"]},
        "exact": {"type": "boolean"},
        "where": PLACE | {"additionalProperties": False},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
    },
    "required": ["city", "days", "where"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "get_weather": WEATHER,
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "now": {"type": "object", "properties": {}},
}
TOOLS = [ToolSchema(name, schema) for name, schema in PARAMETERS.items()]
OFFERED = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
MARKERS = {
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral without headers": ("[TOOL_CALLS]",),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47 in plain text": (),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
}  # fmt: skip
"""Special tokens of the models of some formats."""
OWN = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "harmony": (HARMONY_CALL, "<|call|>"),
    "json_list": ("<|tool_call|>", ""),
}
"""Start and end of formats that upstream does not read."""
KINDS = sorted({"json_tools", *MARKERS, *STYLES} - {"laguna"})


@cache
def form_of(kind: str) -> tuple[CallForm, Words]:
    """Return a format, and the test vocabulary with its special tokens at unused ids."""
    words, name = small(), kind.split(" ")[0]
    pieces, names = list(words.pieces), dict(words.lexicon.names)
    for token, marker in enumerate(MARKERS.get(kind, ()), len(pieces) - 20):
        if marker not in names:
            names[marker], pieces[token] = token, marker.encode()
    if kind.endswith("plain text"):
        names = {marker: token for marker, token in names.items() if token in words.ends}
        pieces = [b"" if piece.startswith(b"<") and len(piece) > 4 else piece for piece in pieces]
        pieces[words.ends[0]] = b"<|im_end|>"
    if name in OWN:
        form = CallForm(name, *OWN[name], names)
        return form, words_of(pieces, {token: marker for marker, token in names.items()}, words.ends)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    kind = None if name == "json_tools" else name
    form = CallForm(kind, module.tool_call_start, module.tool_call_end, names)
    return form, words_of(pieces, {token: marker for marker, token in names.items()}, words.ends)


def said(words: Words, tokens: list[int]) -> str:
    """Return the text with the names of special tokens."""
    return b"".join(words.pieces[token] for token in tokens).decode()


def read(form: CallForm, kind: str, text: str) -> list[dict[str, Any]]:
    """Parse an answer that consists only of calls, by upstream's parser between its markers."""
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{kind.split(' ')[0]}").parse_tool_call
    assert text.startswith(form.start)
    parts = [text.removeprefix(form.start)]
    if form.end:
        parts = re.findall(f"{re.escape(form.start)}(.*?){re.escape(form.end)}", text, re.DOTALL)
        rest = re.sub(f"{re.escape(form.start)}.*?{re.escape(form.end)}", "", text, flags=re.DOTALL)
        assert not rest.strip(), rest
    calls: list[dict[str, Any]] = []
    for part in parts:
        parsed = parse(part, OFFERED)
        calls += parsed if isinstance(parsed, list) else [parsed]
    return calls


def check(calls: list[dict[str, Any]], schemas: Mapping[str, Any] = PARAMETERS) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(call["arguments"], schemas[call["name"]])


def drawn(words: Words, lark: str, seeds: int) -> list[str]:
    """Return the answers that reached their end."""
    grammar = words.grammar(lark)
    found = [draw(words, grammar, seed) for seed in range(seeds)]
    texts = [said(words, tokens) for tokens, has_ended in found if has_ended]
    assert len(texts) > seeds / 4
    return texts


@pytest.mark.parametrize("kind", OWN)
def test_calls_in_formats_that_upstream_does_not_read_are_read_here(kind: str) -> None:
    form, words = form_of(kind)
    spoken = tokenizer_with(*HARMONY if kind == "harmony" else ("<end>",))
    for single in (True, False):
        counts = set()
        for text in drawn(words, CallsGrammar(form, TOOLS).required(single=single), 12):
            lead = "<|channel|>commentary " if kind == "harmony" else ""
            found = answer(spoken, lead + text, tools=PARAMETERS)
            assert found.text == ""
            check([{"name": name, "arguments": arguments} for name, arguments in found.parsed()])
            counts.add(len(found.calls))
        assert counts == {1} if single or kind == "harmony" else max(counts) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_read_by_upstream_and_fit_their_schemas(kind: str) -> None:
    form, words = form_of(kind)
    tools = CallsGrammar(form, TOOLS)
    for text in drawn(words, tools.required(single=False), 20):
        check(read(form, kind, text))
    calls = CallsGrammar(form, TOOLS[2:])
    for single in (True, False):
        counts = {len(read(form, kind, text)) for text in drawn(words, calls.required(single=single), 12)}
        assert counts == {1} if single else max(counts) > 1
    for text in drawn(words, tools.behind(single=True), 8):  # behind its marker, a call goes to its end
        check(read(form, kind, form.start + text))
    for text in drawn(words, CallsGrammar(form, [ToolSchema("say")]).required(single=True), 8):
        check(read(form, kind, text), {"say": {"type": "object"}})  # without parameters: any object


COLOR = {"$ref": "#/$defs/color"}
TYPED: dict[str, Any] = {
    "joined": {"allOf": [{"type": "string"}, {"maxLength": 4}]},
    "described": COLOR | {"description": "A color."},
    "optional": {"anyOf": [COLOR, {"type": "null"}]},
    "mixed": {"enum": ["a", 1, None]},
    "either": {"oneOf": [{"const": "x"}, {"type": "integer", "minimum": 3, "maximum": 9}]},
    "labelled": {"oneOf": [{"const": "x", "title": "X"}, {"const": "y", "title": "Y"}]},
    "short": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a{3,5}$"}]},
}


@pytest.mark.parametrize("kind", sorted(STYLES.keys() - {"laguna"}))
def test_arguments_are_read_here_by_the_types_that_they_were_written_by(kind: str) -> None:
    """Texts have no quotes then, however their schema says that they are texts."""
    form, words = form_of(kind)
    spoken = tokenizer_with(*MARKERS.get(kind, ("<end>",)))
    for shape in TYPED.values():
        schema = {"type": "object", "properties": {"v": shape}, "required": ["v"]}
        schema |= {"$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}}
        grammar = CallsGrammar(form, [ToolSchema("paint", schema)]).required(single=True)
        for text in drawn(words, grammar, 5):
            ((name, arguments),) = answer(spoken, text, tools={"paint": schema}).parsed()
            check([{"name": name, "arguments": arguments}], {"paint": schema})
            assert '"' not in str(arguments["v"]) or "maxLength" in str(shape)


def test_calls_are_written_with_the_white_space_of_the_template() -> None:
    spaces = {("<tool_call>", "{"): " ", ("}", "</tool_call>"): "", ("</tool_call>", "<tool_call>"): "\n\n"}
    form = CallForm(None, spacing=lambda left, right, default: spaces.get((left, right), default))
    words = small()
    matcher = words.compiler.compile(CallsGrammar(form, TOOLS[2:]).required(single=False)).deep_copy()
    text = '<tool_call> {"name": "now", "arguments": {}}</tool_call>\n\n<tool_call> {"name": "now", "argum'
    assert matcher.try_consume_tokens([words.pieces.index(bytes([b])) for b in text.encode()]) == len(text)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a b": {}}}, "a b"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b"}}}, "pattern"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ],
)
def test_keyword_unsupported_by_call_format_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    form, _ = form_of("qwen3_coder")
    with pytest.raises(SchemaError, match=f"look_up.*{keyword}"):
        CallsGrammar(form, [ToolSchema("look_up", schema)])
    with pytest.raises(SchemaError, match="of the tool 'bad' is not an object"):
        CallsGrammar(CallForm(None), [ToolSchema("bad", [1])])


def test_json_arguments_are_held_to_definitions_of_their_own() -> None:
    form, words = form_of("json_tools")
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"]}
    schema |= {"additionalProperties": False, "$defs": {"place": PLACE}}
    for text in drawn(words, CallsGrammar(form, [ToolSchema("go", schema)]).required(single=True), 15):
        check(read(form, "json_tools", text), {"go": schema})
