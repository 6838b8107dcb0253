"""From requests to grammars: response formats, calls, reasoning, and refusals with a message."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec import structs

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.types import StructuredOutput, ToolCallConstraint
from tests.factories import request
from tests.models.fixtures import model_folder
from tests.worker.grammars.sampling import Mask
from tests.worker.input.prompts.test_format import with_template
from tests.worker.input.prompts.test_markup import HARMONY
from worker.grammars import compiler
from worker.grammars.compiler import (
    COMPILE_S_MAX,
    Compiler,
    CompilerBusyError,
    GrammarError,
    GrammarTimeoutError,
)
from worker.input.prompts.grammar_choice import GrammarCache, GrammarSelector
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.output.channels import CONTENT, REASONING
from worker.pocket import MODEL_PATH
from worker.values import EngineRequest, SamplingParams

RULES = PromptRules(context_length=4000, vocabulary=2048, defaults=SamplingParams())
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
STRICT = SCHEMA | {"additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": STRICT}},
    {"type": "function", "function": {"name": "now"}},
]
YES = StructuredOutput(kind="choice", text='["yes", "no"]', param="structured_outputs.choice")
JSON = StructuredOutput(kind="json_schema", text=json.dumps(STRICT), param="response_format")
SILENT = {"enable_thinking": False}


@cache
def tokenizer() -> TokenizerWrapper:
    return open_tokenizer(MODEL_PATH, [])


@cache
def preparer() -> TextPreparer:
    return TextPreparer(tokenizer(), RULES)


@cache
def musings() -> TokenizerWrapper:
    """Return the tokenizer of a model whose template opens no reasoning, but closes what is disabled."""
    return open_tokenizer(model_folder("dense"), [])


@cache
def musing() -> TextPreparer:
    return TextPreparer(musings(), RULES)


def prepare(preparer: TextPreparer, **fields: Any) -> EngineRequest:
    said = {"messages": [{"role": "user", "content": "Hello!"}]} | fields
    return preparer.prepare(request(**said), ())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(preparer(), **fields)
    return caught.value


def allowed(
    engine_request: EngineRequest, text: str = "", spoken: TokenizerWrapper | None = None
) -> set[str] | None:
    """Return the tokens allowed after `text`; None: all. `spoken`: the tokenizer; None: the pocket one."""
    spoken = spoken or tokenizer()
    assert engine_request.sampling.grammar is not None
    guide = engine_request.sampling.grammar.open(spoken.encode(text, add_special_tokens=False))
    found = Mask(RULES.vocabulary).allowed(guide)
    return None if found is None else {spoken.decode([int(token)]) for token in found}


def is_free_but_for_ends(found: set[str] | None) -> bool:
    return found is not None and len(found) > 1000 and END not in found


END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_content_is_held_to_its_form_from_where_it_begins_or_resumes() -> None:
    engine_request = prepare(preparer(), form=YES, template_kwargs=SILENT)
    assert allowed(engine_request) == {"y", "yes", "n", "no"} & (allowed(engine_request) or set())
    assert allowed(engine_request, "yes") == {END}
    raw = prepare(preparer(), form=YES, messages=None, prompt="Well? ")
    assert raw.opening is None
    assert allowed(raw, "no") == {END}
    resumed = prepare(preparer(), form=YES, resume=tokenizer().encode("ye"))
    assert resumed.sampling.grammar is not None
    found = Mask(RULES.vocabulary).allowed(resumed.sampling.grammar.open(resumed.resume))
    assert found is not None
    assert {tokenizer().decode([int(token)]) for token in found} == {"s"}


def test_it_ends_by_a_token_even_if_ends_are_ignored() -> None:
    ends = frozenset(tokenizer().eos_token_ids)
    assert prepare(preparer(), form=YES, ignore_eos=True).end_tokens == ends
    required = ToolCallConstraint(required=True)
    assert prepare(preparer(), tools=TOOLS, calling=required, ignore_eos=True).end_tokens == ends
    strict = ToolCallConstraint(strict=["get_weather"])
    assert prepare(preparer(), tools=TOOLS, calling=strict, ignore_eos=True).end_tokens == frozenset()


def test_a_model_whose_template_leaves_it_to_think_may_do_so_first() -> None:
    engine_request = prepare(musing(), form=YES)
    assert "<think>" in (allowed(engine_request, "", musings()) or set())
    assert is_free_but_for_ends(allowed(engine_request, "<think>so", musings()))
    assert allowed(engine_request, "<think>so</think>yes", musings()) == {END}
    silent = prepare(musing(), form=YES, template_kwargs=SILENT)
    assert "<think>" not in (allowed(silent, "", musings()) or {"<think>"})
    # One whose template opens its thoughts opens none itself.
    assert "<think>" not in (allowed(prepare(preparer(), form=YES)) or {"<think>"})


def test_a_thought_that_the_template_opens_is_free(tmp_path: Path) -> None:
    thinker = with_template(tmp_path, "{{ messages[0].content }}<think>\n")
    engine_request = prepare(TextPreparer(thinker, RULES), form=JSON)
    assert engine_request.opening == REASONING
    assert is_free_but_for_ends(allowed(engine_request, "anything", thinker))
    assert "\n\n" in (allowed(engine_request, "</think>", thinker) or set())
    assert "{" in (allowed(engine_request, "</think>\n\n", thinker) or set())


def test_in_harmony_a_form_is_that_of_the_final_message(tmp_path: Path) -> None:
    with_template(tmp_path, "{{ messages[0].content }}<|start|>assistant")
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    written["added_tokens"] += [
        {"id": 2000 + place, "content": name, "special": True, **plain} for place, name in enumerate(HARMONY)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    spoken = open_tokenizer(tmp_path, [2000 + HARMONY.index("<|return|>")])
    engine_request = prepare(TextPreparer(spoken, RULES), form=YES)
    assert engine_request.opening == CONTENT, "the grammar alone leaves no room for a head"
    assert "<|channel|>" in (allowed(engine_request, "", spoken) or set())
    assert len(allowed(engine_request, "<|channel|>", spoken) or ()) < 10, "its analysis, and nothing else"
    thought = "<|channel|>analysis<|message|>Well,"
    assert is_free_but_for_ends(allowed(engine_request, thought, spoken))
    final = thought + "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert "<|return|>" not in (allowed(engine_request, final, spoken) or {"<|return|>"})
    assert "<|return|>" in (allowed(engine_request, final + "yes", spoken) or set())
    called = prepare(TextPreparer(spoken, RULES), tools=TOOLS, calling=ToolCallConstraint(required=True))
    head = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    assert allowed(called, "", spoken) == {"<|channel|>"}
    assert not {"a", "an", "analysis"} & (allowed(called, "<|channel|>", spoken) or {"a"})
    assert "{" in (allowed(called, head, spoken) or set())
    assert allowed(called, head + "{}", spoken) == {"<|call|>"}


def test_a_thought_closed_by_its_budget_leaves_an_exact_form_exact() -> None:
    """The template's text after reasoning would count as content."""
    budget = {"thinking_budget": 4}
    loose, exact = (prepare(preparer(), form=form, **budget).sampling.thinking_budget for form in (JSON, YES))
    assert loose is not None
    assert exact is not None
    assert len(loose.closing) > 1
    assert exact.closing == loose.closing[:1]


def test_required_calls_are_calls_and_nothing_else() -> None:
    calling = ToolCallConstraint(required=True)
    engine_request = prepare(preparer(), tools=TOOLS, calling=calling, template_kwargs=SILENT)
    assert allowed(engine_request) == {"<tool_call>"}
    assert allowed(engine_request, CALL[: -len("</tool_call>")]) == {"</tool_call>"}
    assert END in (allowed(engine_request, CALL) or set())
    assert "<tool_call>" in (allowed(engine_request, CALL + "\n") or set())
    assert "R" not in (allowed(engine_request, CALL[: CALL.index("Oslo") - 1] + '"O') or {"R"})


def test_one_call_is_one_and_a_named_tool_is_that_one() -> None:
    calling = ToolCallConstraint(required=True, single=True)
    engine_request = prepare(preparer(), tools=TOOLS, calling=calling, template_kwargs=SILENT)
    assert allowed(engine_request, CALL) == {END}
    calling = ToolCallConstraint(required=True, name="now")
    engine_request = prepare(preparer(), tools=TOOLS, calling=calling, template_kwargs=SILENT)
    assert "n" in (allowed(engine_request, '<tool_call>\n{"name": "') or set())
    assert "g" not in (allowed(engine_request, '<tool_call>\n{"name": "') or {"g"})
    unknown = ToolCallConstraint(required=True, name="later")
    assert refused(tools=TOOLS, calling=unknown).param == "tool_choice"


def test_a_strict_tool_is_held_to_its_schema_and_another_to_any_object() -> None:
    engine_request = prepare(preparer(), tools=TOOLS, calling=ToolCallConstraint(strict=["get_weather"]))
    weather = CALL[: CALL.index("city")]
    now = weather.replace("get_weather", "now")
    assert allowed(engine_request, "Well: ") is None
    assert "x" not in (allowed(engine_request, weather) or {"x"})
    assert {"x", "c"} <= (allowed(engine_request, now) or set())
    assert allowed(engine_request, CALL) is None
    loose = prepare(preparer(), tools=TOOLS, calling=ToolCallConstraint(strict=["now"]))
    assert "x" in (allowed(loose, weather) or set())


def test_with_tools_an_answer_has_its_form_or_is_calls() -> None:
    engine_request = prepare(preparer(), form=YES, tools=TOOLS, template_kwargs=SILENT)
    begun = allowed(engine_request) or set()
    assert {"<tool_call>", "y"} <= begun
    assert allowed(engine_request, "yes") == {END}
    assert END in (allowed(engine_request, CALL) or set())


@pytest.mark.parametrize("keyword", ["not", "uniqueItems"])
def test_a_refusal_names_the_keyword_and_the_parameter(keyword: str) -> None:
    schema = {"type": ["array", "object"], keyword: {"type": "null"}}
    error = refused(form=structs.replace(JSON, text=json.dumps(schema)))
    assert error.code is Code.INVALID_REQUEST
    assert error.param == "response_format"
    assert f'"{keyword}"' in error.message
    parameters = {"type": "object", keyword: {"type": "null"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = refused(tools=[tool], calling=ToolCallConstraint(required=True, strict=["f"]))
    assert (error.param, f'"{keyword}"' in error.message) == ("tools", True)
    said = refused(tools=[tool], calling=ToolCallConstraint(strict=["f"])).message
    assert error.message == said
    assert "start:" not in said, "the message must not contain the generated grammar"


def test_required_tool_loses_only_the_keywords_that_cannot_be_enforced() -> None:
    texts, decimal = {"type": "string"}, {"type": "string", "pattern": "^(?!0)[0-9]+$", "maxLength": 3}
    tools = {
        "zod": {"labels": {"type": "object", "propertyNames": texts, "additionalProperties": texts}},
        "set": {"labels": {"type": "array", "uniqueItems": True, "items": {"enum": ["a"]}}},
        "decimal": {"labels": {"anyOf": [{"type": "number"}, decimal]}, "code": {"pattern": "^a$"}},
        "back": {"labels": texts | {"pattern": r"(b)\1"}, "code": {"pattern": "^a$"}},
        "optional": {"labels": {"anyOf": [{"not": {}}, {"type": "object", "not": {"required": ["a"]}}]}},
        "broken": {"labels": []},
    }
    begun = {"zod": "{", "set": "[", "decimal": '"0-123456789', "back": '"', "optional": "{", "broken": ""}
    lost = {"zod": (), "set": ("uniqueItems",), "optional": ("not",), "broken": ("parameters",)}
    offered = [
        {"name": name, "parameters": {"type": "object", "properties": listed, "required": [*listed]}}
        for name, listed in tools.items()
    ]
    calling = ToolCallConstraint(required=True)
    for each in [[tool] for tool in offered] + [offered]:
        found = prepare(preparer(), tools=each, calling=calling, template_kwargs=SILENT)
        expected = {keyword for tool in each for keyword in lost.get(tool["name"], ("pattern",))}
        assert found.relaxed == tuple(sorted(expected))
        for name in {tool["name"] for tool in each} - {"broken"}:
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"labels":'
            firsts = {token.strip()[:1] for token in allowed(found, call) or ()} - {""}
            assert firsts <= {*begun[name]}, (name, firsts)
            if "code" in tools[name]:  # its own pattern is held to
                assert not {"b", "1"} & (allowed(found, call + '"1", "code": "') or {"b"})


@pytest.mark.parametrize("form", [None, StructuredOutput(kind="json_schema", text="{}", param="guided_json")])
def test_a_busy_compiler_refuses_for_now_and_loosens_nothing(
    form: StructuredOutput | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: Compiler, grammar: str, wait_s_max: float) -> None:
        raise CompilerBusyError

    monkeypatch.setattr(Compiler, "compile", busy)
    tools = [{"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}]
    conversation = Conversation(messages=[{"role": "user", "content": "x"}], tools=tools)
    calling = ToolCallConstraint(required=True) if form is None else None
    selector = GrammarSelector(tokenizer(), None, RULES.vocabulary, GrammarCache())
    with pytest.raises(RequestError) as caught:
        selector.grammar_of(request(messages=[], calling=calling, form=form), conversation, CONTENT, "")
    assert caught.value.code == Code.TEXT_GENERATION_BUSY
    assert caught.value.retry_after_s == COMPILE_S_MAX


def test_schemas_of_one_request_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], list[float]()

    def compile(self: Compiler, grammar: str, wait_s_max: float) -> None:
        waits.append(wait_s_max)
        now[0] += 1.0
        raise GrammarError("too large") if wait_s_max > 0 else GrammarTimeoutError("it takes longer")

    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Compiler, "compile", compile)
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": {}}} for n in range(50)]
    conversation = Conversation(messages=[{"role": "user", "content": "x"}], tools=tools)
    asked = request(messages=[], calling=ToolCallConstraint(required=True))
    selector = GrammarSelector(tokenizer(), None, RULES.vocabulary, GrammarCache())
    with pytest.raises(RequestError, match="longer than 3 s") as caught:
        selector.grammar_of(asked, conversation, CONTENT, "")
    assert caught.value.param == "tools"
    assert 1 < len(waits) <= COMPILE_S_MAX + 1
    assert max(waits) <= COMPILE_S_MAX
    assert waits[-1] == 0
