"""From requests to tokens: templates, limits, defaults, and errors of the request."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec import Raw, structs

from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS
from protocol.errors import Code, RequestError
from protocol.types import Capabilities, Sampling, TokenizeOptions, ToolCallConstraint
from tests.factories import request
from tests.models.fixtures import model_folder
from tests.worker.input.prompts.test_format import with_template
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.input.prompts.sampling_defaults import read_defaults
from worker.input.prompts.template import probe, render, template_of
from worker.load.config import read_config
from worker.output.channels import CONTENT, REASONING
from worker.values import EngineRequest, SamplingParams, Tokenized

RULES = PromptRules(context_length=100, vocabulary=2048, defaults=SamplingParams(temperature=1.0))
USER = {"role": "user", "content": "Hello!"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@cache
def tokenizer() -> TokenizerWrapper:
    return open_tokenizer(model_folder("dense"), [1987])


def prepare(rules: PromptRules = RULES, media: tuple[bytes, ...] = (), **fields: Any) -> EngineRequest:
    asked = request(**{"sampling": Sampling(seed=7), "messages": [USER], **fields})
    return TextPreparer(tokenizer(), rules).prepare(asked, media)


def tokenize(wanted: TokenizeOptions, **fields: Any) -> Tokenized:
    """Tokenize a request without preparing it for generation."""
    return TextPreparer(tokenizer(), RULES).tokenize(request(tokenizing=wanted, **fields), ())


def text(engine_request: EngineRequest) -> str:
    return str(tokenizer().decode(list(engine_request.tokens)))


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    return caught.value


ENDS_IN_MESSAGE = {PROMPT_ENDS: IN_MESSAGE}


@pytest.mark.parametrize("content", ["The tide ", "<think>\nIt may", "a\n\nb\n"])
def test_a_message_that_goes_on_ends_the_prompt_as_upstream_has_it(content: str) -> None:
    first, last = ({"role": "assistant", "content": text} for text in ("Yes.", content))
    messages = [USER, first, USER, last]
    engine_request = prepare(messages=messages, template_kwargs=ENDS_IN_MESSAGE)
    inner = tokenizer()._tokenizer
    upstream = inner.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text(engine_request) == upstream
    assert text(engine_request).endswith(content)
    assert engine_request.opening == (REASONING if "<think>" in content else CONTENT)


# --- rendering -----------------------------------------------------------------------------------------


def test_messages_are_rendered_up_to_where_the_model_speaks() -> None:
    engine_request = prepare()
    assert text(engine_request) == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert engine_request.id == "a"
    messages = [USER, {"role": "assistant", "content": "Hi."}]
    assert text(prepare(messages=messages)).endswith("Hi.<|im_end|>\n<|im_start|>assistant\n")
    assert text(prepare(messages=None, prompt="Once <|im_end|> upon")) == "Once <|im_end|> upon"
    bare = text(prepare(template_kwargs={PROMPT_ENDS: BEFORE_TURN}))
    assert text(engine_request) == bare + "<|im_start|>assistant\n"


def test_tools_may_be_called_by_name_with_what_their_schemas_say() -> None:
    rules = PromptRules(context_length=1000, vocabulary=2048, defaults=SamplingParams())
    bare = {"type": "function", "function": {"name": "now"}}
    engine_request = prepare(rules, tools=[TOOL, bare])
    assert engine_request.tools == {"get_weather": TOOL["function"].get("parameters", {}), "now": {}}
    assert not engine_request.single_call
    for single in (True, False):
        assert prepare(rules, tools=[TOOL], calling=ToolCallConstraint(single=single)).single_call == single
    assert prepare(rules).tools == {}
    assert prepare(rules, tools=[{"type": "web_search"}]).tools == {}


@pytest.mark.parametrize("name", ["tokenize", "tools"])
def test_template_arguments_cannot_replace_the_servers_own(name: str) -> None:
    error = refused(template_kwargs={name: "x"})
    assert error.code is Code.INVALID_REQUEST
    assert error.param == "chat_template_kwargs"
    assert name in error.message


# --- errors of the request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [[], [{"content": "no role"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [7]}]],
)
def test_messages_the_template_trips_over_are_the_requests_fault(messages: list[Any]) -> None:
    error = refused(messages=messages)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "messages")


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("messages", b"\x07"),
        ("messages", b"\x91\x81\xa1a\xa1\xff"),
        ("messages", b"\x91\x81\xa1a" + b"\x91" * 100_000 + b"\x00"),
        ("tools", b"\xa1x"),
        ("template_kwargs", b"\x90"),
    ],
)
def test_malformed_packed_field_is_an_invalid_request(name: str, packed: bytes) -> None:
    asked = request(**{"messages": [USER], name: Raw(packed)})
    with pytest.raises(RequestError, match="is malformed") as caught:
        TextPreparer(tokenizer(), RULES).prepare(asked, ())
    assert caught.value.code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    "fields", [{"prompt": ""}, {"prompt": None}, {"prompt": "\ud83d"}, {"tokens": []}], ids=repr
)
def test_an_empty_prompt_and_half_a_character_are_refused(fields: dict[str, Any]) -> None:
    error = refused(messages=None, **fields)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt")


# --- limits --------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    messages = [{"role": "user", "content": "one two three " * 50}]
    count = len(prepare(PromptRules(10_000, 2048, SamplingParams()), messages=messages).tokens)
    error = refused(messages=messages)
    assert error.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert error.param == "messages"
    assert error.message == (
        f"This model's maximum context length is 100 tokens. However, your messages resulted in {count} "
        "tokens. Please reduce the length of the messages."
    )
    assert error.details == {"prompt_tokens": count, "context_length": 100}
    raw = refused(messages=None, prompt="one two three " * 50)
    assert raw.param == "prompt"
    assert "your prompt resulted in" in raw.message


def test_the_answer_takes_what_the_context_has_left() -> None:
    length = len(prepare().tokens)
    assert prepare().max_tokens == 100 - length
    assert prepare(max_tokens=5).max_tokens == 5
    assert prepare(max_tokens=5000).max_tokens == 100 - length
    assert prepare(PromptRules(length + 1, 2048, SamplingParams())).max_tokens == 1
    assert refused(rules=PromptRules(length, 2048, SamplingParams())).code is Code.CONTEXT_LENGTH_EXCEEDED
    assert refused(max_tokens=0).param == "max_tokens"


# --- defaults ------------------------------------------------------------------------------------------


def test_unset_sampling_params_take_the_model_defaults_and_set_ones_reach_the_draw() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)
    rules = PromptRules(100, 2048, defaults)
    assert prepare(rules).sampling == replace(defaults, seed=7)
    chosen = Sampling(seed=8, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    assert prepare(rules, sampling=chosen).sampling == SamplingParams(seed=8)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": 0}
    sampling = Sampling(seed=7, temperature=0.0, logit_bias={2047: 1.5, 3: -100.0, 5: 0.0}, **penalties)
    expected = SamplingParams(seed=7, logit_bias=((3, -100.0), (2047, 1.5)), **penalties)
    assert prepare(sampling=sampling).sampling == expected
    # A top_k as large as the vocabulary is off.
    assert prepare(sampling=Sampling(seed=1, top_k=2047)).sampling.top_k == 2047
    assert prepare(sampling=Sampling(seed=1, top_k=2048)).sampling.top_k == 0


@pytest.mark.parametrize("token", [-1, 2048])
def test_a_bias_for_a_token_that_the_model_has_not_is_refused(token: int) -> None:
    error = refused(sampling=Sampling(seed=1, logit_bias={3: 1.0, token: 1.0}))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "logit_bias")
    assert f"token {token}, " in error.message
    assert "0 to 2047" in error.message


def test_other_fields_are_passed_on() -> None:
    engine_request = prepare(priority=-3, deadline_s=2.5, stop=["END", "", "\n"])
    assert (engine_request.priority, engine_request.deadline_s) == (-3, 2.5)
    assert engine_request.stop == ("END", "\n")
    assert engine_request.end_tokens == {1987, 1989}, "the model's and the tokenizer's"
    assert prepare(ignore_eos=True).end_tokens == frozenset()
    assert (prepare().priority, prepare().deadline_s) == (0, None)
    assert prepare(messages=None, tokens=[5, 6, 7], echo=True, scored=2).scored == 2


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (None, SamplingParams(temperature=1.0)),
        ({"do_sample": True, "top_p": None}, SamplingParams(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.0)),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "other": [1]},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05),
        ),
    ],
)
def test_defaults_are_those_of_the_models_makers(
    tmp_path: Path, config: dict[str, Any] | None, sampling: SamplingParams
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_defaults(tmp_path) == sampling


def test_a_template_is_found_beside_an_older_processor(tmp_path: Path) -> None:
    own = with_template(tmp_path, None)
    assert template_of(own) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    found = template_of(open_tokenizer(tmp_path, []))
    assert found is not None
    assert render(found, [USER]) == f"{USER['content']}!"
    other = template_of(with_template(tmp_path, "{{ messages[0].content }}?"))  # the tokenizer's own wins
    assert other is not None
    assert render(other, [USER]) == f"{USER['content']}?"


def test_settings_of_a_newer_upstream_are_left_out(tmp_path: Path) -> None:
    with_template(tmp_path, "{{ messages[0].content }}")
    file = tmp_path / "tokenizer_config.json"
    newer = {"chat_template_type": "of_tomorrow", "tool_parser_type": "of_tomorrow"}
    file.write_text(json.dumps(json.loads(file.read_text()) | newer))
    found = template_of(open_tokenizer(tmp_path, []))
    assert found is not None
    assert render(found, [USER]) == USER["content"]


@pytest.mark.parametrize(
    ("generation", "config", "text", "ends"),
    [
        ([1], [1, 2], None, (1, 2)),
        (3, 2, 3, (3, 2)),
        (None, 2, None, (2,)),
        (None, None, [4, True, "x"], (4,)),
    ],
)
def test_whatever_lists_an_end_of_turn_ends_it(
    tmp_path: Path, generation: Any, config: Any, text: Any, ends: tuple[int, ...]
) -> None:
    told = {"model_type": "llama", "eos_token_id": config, "text_config": {"eos_token_id": text}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_config(tmp_path, "a").end_tokens == ends


@pytest.mark.parametrize(
    ("template", "capabilities"),
    [
        (None, Capabilities()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Capabilities(system_in_place=True)),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            Capabilities(),
        ),
        (  # moves all system messages to the front
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            Capabilities(),
        ),
        (  # always reasons
            "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}",
            Capabilities(thinking=True),
        ),
    ],
)
def test_capabilities_are_probed(tmp_path: Path, template: str | None, capabilities: Capabilities) -> None:
    own = tokenizer()
    assert probe(template_of(own), own) == Capabilities(tools=True, thinking=True, system_in_place=True)
    other = with_template(tmp_path, template)
    assert structs.replace(probe(template_of(other), other), layout=[], template_problem="") == capabilities


def test_a_token_that_the_model_has_not_is_named_with_its_place() -> None:
    error = refused(messages=None, tokens=[5, 2047, 2048], source="prompt[3]")
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt[3][2]")
    assert "2048" in error.message
    assert "0 to 2047" in error.message
    assert refused(messages=None, tokens=[-1 % 2**31]).param == "prompt[0]"


def test_an_echo_alone_may_fill_the_whole_context() -> None:
    engine_request = prepare(messages=None, tokens=[5] * 100, echo=True, max_tokens=0)
    assert (engine_request.max_tokens, engine_request.echo) == (0, True)
    error = refused(messages=None, tokens=[5] * 101, echo=True, max_tokens=0)
    assert error.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert refused(messages=None, tokens=[5], max_tokens=0).param == "max_tokens"


ALL = TokenizeOptions(tokens=True, pieces=True)


def test_a_conversation_is_counted_as_it_is_run() -> None:
    run = prepare(replace(RULES, context_length=1000), tools=[TOOL])
    counted = tokenize(ALL, messages=[USER], tools=[TOOL])
    assert counted.count == len(run.tokens)
    assert counted.tokens == run.tokens
    assert counted.pieces == tuple(tokenizer().convert_ids_to_tokens(list(run.tokens)))
    bare = tokenize(TokenizeOptions(), messages=[USER], tools=[TOOL])
    assert bare == Tokenized(id="a", count=counted.count)
