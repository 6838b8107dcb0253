"""From requests to what their answers are held to: forms, calls, thoughts, and refusals in words."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec import UNSET

from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Calling, Form, Sampling
from tests.models.fixtures import model_folder
from tests.worker.grammars.sampling import Mask
from worker.contract import Draw, Prepared
from worker.models.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.output.channels import CONTENT, REASONING
from worker.pocket import MODEL_PATH

RULES = PromptRules(context_length=4000, vocabulary=2048, defaults=Draw())
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
STRICT = SCHEMA | {"additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": STRICT}},
    {"type": "function", "function": {"name": "now"}},
]
YES = Form(kind="choice", text='["yes", "no"]', param="structured_outputs.choice")
JSON = Form(kind="json_schema", text=json.dumps(STRICT), param="response_format")
SILENT = {"enable_thinking": False}


@cache
def tokenizer() -> TokenizerWrapper:
    return open_tokenizer(MODEL_PATH, [])


@cache
def preparer() -> TextPreparer:
    return TextPreparer(tokenizer(), RULES)


@cache
def musings() -> TokenizerWrapper:
    """Of a model whose template opens no thought, and closes one where it is to have none."""
    return open_tokenizer(model_folder("dense"), [])


@cache
def musing() -> TextPreparer:
    return TextPreparer(musings(), RULES)


def prepare(preparer: TextPreparer, **fields: Any) -> Prepared:
    said = {"messages": [{"role": "user", "content": "Hello!"}]} | fields
    for name in said.keys() & {"messages", "tools", "template_kwargs"}:
        said[name] = UNSET if said[name] is None else pack(said[name])
    request = Generate(incarnation="g", id="r", sampling=Sampling(seed=1), **said)
    return preparer.prepare(request, ())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(preparer(), **fields)
    return caught.value


def allowed(prepared: Prepared, text: str = "", spoken: TokenizerWrapper | None = None) -> set[str] | None:
    """What may follow a text; None: anything. `spoken`: by the embedded model's tokenizer, or another."""
    spoken = spoken or tokenizer()
    assert prepared.draw.grammar is not None
    guide = prepared.draw.grammar.open(spoken.encode(text, add_special_tokens=False))
    found = Mask(RULES.vocabulary).allowed(guide)
    return None if found is None else {spoken.decode([int(token)]) for token in found}


def is_free_but_for_ends(found: set[str] | None) -> bool:
    return found is not None and len(found) > 1000 and END not in found


END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_who_asks_for_nothing_is_held_to_nothing() -> None:
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "calling": Calling(single=True)}):
        assert prepare(preparer(), **fields).draw.grammar is None
    assert prepare(preparer(), calling=Calling(required=True)).draw.grammar is None


def test_content_is_held_to_its_form() -> None:
    prepared = prepare(preparer(), form=YES, template_kwargs=SILENT)
    assert allowed(prepared) == {"y", "yes", "n", "no"} & (allowed(prepared) or set())
    assert END in (allowed(prepared, "yes") or set())
    assert allowed(prepared, "yes") == {END}


def test_a_raw_completion_is_held_as_well() -> None:
    prepared = prepare(preparer(), form=YES, messages=None, prompt="Well? ")
    assert prepared.opening is None
    assert allowed(prepared, "no") == {END}


def test_it_ends_by_a_token_even_if_ends_are_ignored() -> None:
    ends = frozenset(tokenizer().eos_token_ids)
    assert prepare(preparer(), form=YES, ignore_eos=True).end_tokens == ends
    required = Calling(required=True)
    assert prepare(preparer(), tools=TOOLS, calling=required, ignore_eos=True).end_tokens == ends
    strict = Calling(strict=["get_weather"])
    assert prepare(preparer(), tools=TOOLS, calling=strict, ignore_eos=True).end_tokens == frozenset()


def test_a_form_without_thoughts_is_text_whatever_is_in_it() -> None:
    assert prepare(preparer(), form=JSON, template_kwargs=SILENT).opening is None
    assert prepare(musing(), form=JSON).opening == CONTENT
    assert prepare(preparer(), form=JSON, tools=TOOLS, template_kwargs=SILENT).opening == CONTENT


def test_a_model_whose_template_leaves_it_to_think_may_do_so_first() -> None:
    prepared = prepare(musing(), form=YES)
    assert "<think>" in (allowed(prepared, "", musings()) or set())
    assert is_free_but_for_ends(allowed(prepared, "<think>so", musings()))
    assert allowed(prepared, "<think>so</think>yes", musings()) == {END}
    silent = prepare(musing(), form=YES, template_kwargs=SILENT)
    assert "<think>" not in (allowed(silent, "", musings()) or {"<think>"})


def test_one_whose_template_opens_its_thoughts_opens_none_itself() -> None:
    assert "<think>" not in (allowed(prepare(preparer(), form=YES)) or {"<think>"})


def test_a_thought_that_the_template_opens_is_free(tmp_path: Path) -> None:
    for file in model_folder("dense").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    thinker = open_tokenizer(tmp_path, [])
    prepared = prepare(TextPreparer(thinker, RULES), form=JSON)
    assert prepared.opening == REASONING
    assert is_free_but_for_ends(allowed(prepared, "anything", thinker))
    assert "\n\n" in (allowed(prepared, "</think>", thinker) or set())
    assert "{" in (allowed(prepared, "</think>\n\n", thinker) or set())


def test_a_thought_closed_by_its_budget_leaves_an_exact_form_exact() -> None:
    """What the template has behind a thought would be content."""
    budget = {"thinking_budget": 4}
    loose, exact = (prepare(preparer(), form=form, **budget).draw.thoughts for form in (JSON, YES))
    assert loose is not None
    assert exact is not None
    assert len(loose.closing) > 1
    assert exact.closing == loose.closing[:1]


def test_required_calls_are_calls_and_nothing_else() -> None:
    prepared = prepare(preparer(), tools=TOOLS, calling=Calling(required=True), template_kwargs=SILENT)
    assert allowed(prepared) == {"<tool_call>"}
    assert allowed(prepared, CALL[: -len("</tool_call>")]) == {"</tool_call>"}
    assert END in (allowed(prepared, CALL) or set())
    assert "<tool_call>" in (allowed(prepared, CALL + "\n") or set())
    assert "R" not in (allowed(prepared, CALL[: CALL.index("Oslo") - 1] + '"O') or {"R"})


def test_one_call_is_one() -> None:
    calling = Calling(required=True, single=True)
    prepared = prepare(preparer(), tools=TOOLS, calling=calling, template_kwargs=SILENT)
    assert allowed(prepared, CALL) == {END}


def test_a_named_tool_is_that_one() -> None:
    calling = Calling(required=True, name="now")
    prepared = prepare(preparer(), tools=TOOLS, calling=calling, template_kwargs=SILENT)
    assert "n" in (allowed(prepared, '<tool_call>\n{"name": "') or set())
    assert "g" not in (allowed(prepared, '<tool_call>\n{"name": "') or {"g"})
    unknown = Calling(required=True, name="later")
    assert refused(tools=TOOLS, calling=unknown).param == "tool_choice"


def test_a_strict_tool_is_held_to_its_schema_and_another_to_any_object() -> None:
    prepared = prepare(preparer(), tools=TOOLS, calling=Calling(strict=["get_weather"]))
    weather = CALL[: CALL.index("city")]
    now = weather.replace("get_weather", "now")
    assert allowed(prepared, "Well: ") is None
    assert "x" not in (allowed(prepared, weather) or {"x"})
    assert {"x", "c"} <= (allowed(prepared, now) or set())
    assert allowed(prepared, CALL) is None
    loose = prepare(preparer(), tools=TOOLS, calling=Calling(strict=["now"]))
    assert "x" in (allowed(loose, weather) or set())


def test_with_tools_an_answer_has_its_form_or_is_calls() -> None:
    prepared = prepare(preparer(), form=YES, tools=TOOLS, template_kwargs=SILENT)
    begun = allowed(prepared) or set()
    assert {"<tool_call>", "y"} <= begun
    assert allowed(prepared, "yes") == {END}
    assert END in (allowed(prepared, CALL) or set())


def test_an_answer_to_be_resumed_is_held_where_it_stood() -> None:
    prepared = prepare(preparer(), form=YES, resume=tokenizer().encode("ye"))
    assert prepared.resume
    assert prepared.draw.grammar is not None
    found = Mask(RULES.vocabulary).allowed(prepared.draw.grammar.open(prepared.resume))
    assert found is not None
    assert {tokenizer().decode([int(token)]) for token in found} == {"s"}


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "if"])
def test_a_refusal_names_the_keyword_and_the_parameter(keyword: str) -> None:
    schema = {"type": ["array", "object"], keyword: {"type": "null"}}
    error = refused(form=Form(kind="json_schema", text=json.dumps(schema), param="response_format"))
    assert error.code is Code.INVALID_REQUEST
    assert error.param == "response_format"
    assert f'"{keyword}"' in error.message
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", keyword: {}}}}
    error = refused(tools=[tool], calling=Calling(required=True, strict=["f"]))
    assert (error.param, f'"{keyword}"' in error.message) == ("tools", True)
    said = refused(tools=[tool], calling=Calling(strict=["f"])).message
    assert error.message == said
    assert "start:" not in said, "the grammar that was made of it is no business of a client's"


def test_a_required_call_of_a_tool_that_cannot_be_held_to_has_any_arguments() -> None:
    parameters = STRICT | {"propertyNames": {"minLength": 1}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    calling = Calling(required=True)
    prepared = prepare(preparer(), tools=[*TOOLS, odd], calling=calling, template_kwargs=SILENT)
    weather = CALL[: CALL.index("city")]
    assert "x" in (allowed(prepared, weather.replace("get_weather", "odd")) or set())
    assert "x" not in (allowed(prepared, weather) or {"x"})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "'oneOf'"),
        ({"type": "string", "format": "iri"}, "'format'"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "'minProperties'"),
        ({"type": "string", "pattern": "(?=a)b"}, "regular expression"),
        ({"type": "object", "properties": {"a": {"type": "object", "$ref": "#"}}}, "'$ref'"),
        ({"multipleOf": 0.0007}, "'multipleOf'"),
        ({"const": 2**60}, "'const'"),
    ],
)
def test_a_refusal_says_what_is_wrong(schema: dict[str, Any], said: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    message = refused(form=Form(kind="json_schema", text=json.dumps(schema))).message
    assert said in message
    assert message.endswith(".")
    assert len(message) < 600
