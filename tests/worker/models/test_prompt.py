"""From requests to tokens: templates, limits, defaults, and what is the request's own fault."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec import UNSET, Raw

from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, pack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Calling, Capabilities, Media, Sampling, Tokenizing
from tests.models.fixtures import model_folder
from worker.contract import Draw, Prepared, Tokenized
from worker.models.draw import read_defaults
from worker.models.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.models.template import probe
from worker.output.channels import CONTENT, REASONING

RULES = PromptRules(context_length=100, vocabulary=2048, defaults=Draw(temperature=1.0))
USER = {"role": "user", "content": "Hello!"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@cache
def tokenizer() -> TokenizerWrapper:
    return open_tokenizer(model_folder("dense"), [1987])


def prepare(rules: PromptRules = RULES, media: tuple[bytes, ...] = (), **fields: Any) -> Prepared:
    fields = {"sampling": Sampling(seed=7), "messages": [USER]} | fields
    for name in {"messages", "tools", "template_kwargs"} & fields.keys():
        fields[name] = UNSET if fields[name] is None else pack(fields[name])
    request = Generate(incarnation="g", id="r", **fields)
    return TextPreparer(tokenizer(), rules).prepare(request, media)


def tokenize(wanted: Tokenizing, **fields: Any) -> Tokenized:
    """As `prepare`, of what is only taken apart."""
    for name in {"messages", "tools"} & fields.keys():
        fields[name] = pack(fields[name])
    request = Generate(incarnation="g", id="r", sampling=Sampling(seed=7), tokenizing=wanted, **fields)
    return TextPreparer(tokenizer(), RULES).tokenize(request, ())


def text(prepared: Prepared) -> str:
    return str(tokenizer().decode(list(prepared.tokens)))


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    return caught.value


def with_template(tmp_path: Path, template: str | None) -> TokenizerWrapper:
    """The dense model's tokenizer with another chat template, or with none."""
    for file in model_folder("dense").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return open_tokenizer(tmp_path, [])


# --- answers that are begun ----------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
ENDS_IN_MESSAGE = {PROMPT_ENDS: IN_MESSAGE}


@pytest.mark.parametrize("content", ["The tide", "The tide ", "x", "<think>\nIt may", "a\n\nb\n"])
def test_a_message_that_goes_on_ends_the_prompt_as_upstream_has_it(content: str) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "Yes."},
        USER,
        {"role": "assistant", "content": content},
    ]
    prepared = prepare(messages=messages, template_kwargs=ENDS_IN_MESSAGE)
    upstream = tokenizer()._tokenizer.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert text(prepared) == upstream
    assert text(prepared).endswith(content)
    assert prepared.opening == (REASONING if "<think>" in content else CONTENT)


def test_a_prompt_can_end_before_the_models_turn() -> None:
    opened, closed = (text(prepare(template_kwargs=ends)) for ends in ({}, {PROMPT_ENDS: BEFORE_TURN}))
    assert opened == closed + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "last",
    [USER, {"role": "assistant", "content": ""}, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
)
def test_what_cannot_go_on_is_history(last: dict[str, Any]) -> None:
    messages = [USER, last]
    assert text(prepare(messages=messages, template_kwargs=ENDS_IN_MESSAGE)) == text(
        prepare(messages=messages)
    )


def test_a_template_must_show_the_message_that_goes_on(tmp_path: Path) -> None:
    silent = with_template(tmp_path, "{{ messages[0].content }}")
    request = Generate(
        incarnation="g",
        id="r",
        sampling=Sampling(seed=7),
        messages=pack([USER, {"role": "assistant", "content": "So"}]),
        template_kwargs=pack(ENDS_IN_MESSAGE),
    )
    with pytest.raises(RequestError, match="does not take these messages"):
        TextPreparer(silent, RULES).prepare(request, ())


# --- rendering -----------------------------------------------------------------------------------------


def test_messages_are_rendered_up_to_where_the_model_speaks() -> None:
    prepared = prepare()
    assert text(prepared) == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.id == "r"


def test_an_answer_at_the_end_is_followed_by_another_turn() -> None:
    messages = [USER, {"role": "assistant", "content": "Hi."}]
    assert text(prepare(messages=messages)).endswith("Hi.<|im_end|>\n<|im_start|>assistant\n")


def test_tools_and_template_arguments_reach_the_template() -> None:
    rules = PromptRules(1000, 2048, Draw())
    assert '"get_weather"' in text(prepare(rules, tools=[TOOL]))
    assert "<think>" not in text(prepare(rules, template_kwargs={"enable_thinking": True}))
    assert text(prepare(rules, template_kwargs={"enable_thinking": False})).endswith(
        "<think>\n\n</think>\n\n"
    )


def test_tools_may_be_called_by_name_with_what_their_schemas_say() -> None:
    rules = PromptRules(context_length=1000, vocabulary=2048, defaults=Draw())
    bare = {"type": "function", "function": {"name": "now"}}
    prepared = prepare(rules, tools=[TOOL, bare])
    assert prepared.tools == {"get_weather": TOOL["function"].get("parameters", {}), "now": {}}
    assert not prepared.single_call
    for single in (True, False):
        assert prepare(rules, tools=[TOOL], calling=Calling(single=single)).single_call == single
    assert prepare(rules).tools == {}
    assert prepare(rules, tools=[{"type": "web_search"}]).tools == {}


def test_thinking_is_left_as_the_template_has_it(tmp_path: Path) -> None:
    template = "{% if enable_thinking is defined %}told{% else %}untold{% endif %}"
    preparer = TextPreparer(with_template(tmp_path, template), RULES)
    request = Generate(incarnation="g", id="r", sampling=Sampling(seed=1), messages=pack([USER]))
    assert tokenizer().decode(list(preparer.prepare(request, ()).tokens)) == "untold"


def test_a_raw_prompt_is_encoded_as_it_is() -> None:
    assert text(prepare(messages=None, prompt="Once <|im_end|> upon")) == "Once <|im_end|> upon"


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "add_generation_prompt", "conversation", "tools"]
)
def test_template_arguments_cannot_replace_the_servers_own(name: str) -> None:
    error = refused(template_kwargs={name: "x"})
    assert error.code is Code.INVALID_REQUEST
    assert error.param == "chat_template_kwargs"
    assert name in error.message


# --- faults of the request -----------------------------------------------------------------------------


def test_what_the_template_says_against_the_messages_is_passed_on() -> None:
    error = refused(messages=[{"role": "wizard", "content": "abracadabra"}])
    assert error.code is Code.INVALID_REQUEST
    assert error.param == "messages"
    assert "Unknown role: wizard" in error.message


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
        ("messages", b"\x91\x07"),
        ("messages", b"\x91\x81\xa1a\xa1\xff"),
        ("messages", b"\x91\x81\xa1a" + b"\x91" * 100_000 + b"\x00"),
        ("tools", b"\xa1x"),
        ("template_kwargs", b"\x90"),
        ("template_kwargs", b""),
    ],
)
def test_what_is_packed_wrongly_is_the_requests_fault(name: str, packed: bytes) -> None:
    fields: dict[str, Any] = {"messages": pack([USER]), name: Raw(packed)}
    request = Generate(incarnation="g", id="r", sampling=Sampling(seed=1), **fields)
    with pytest.raises(RequestError, match="cannot be read") as caught:
        TextPreparer(tokenizer(), RULES).prepare(request, ())
    assert caught.value.code is Code.INVALID_REQUEST


def test_messages_without_a_template_are_refused_with_advice(tmp_path: Path) -> None:
    preparer = TextPreparer(with_template(tmp_path, None), RULES)
    request = Generate(incarnation="g", id="r", sampling=Sampling(seed=1), messages=pack([USER]))
    with pytest.raises(RequestError, match=r"no chat template.*completions") as caught:
        preparer.prepare(request, ())
    assert caught.value.param == "messages"
    raw = Generate(incarnation="g", id="r", sampling=Sampling(seed=1), prompt="Hello!")
    assert preparer.prepare(raw, ()).tokens


@pytest.mark.parametrize("prompt", ["", None])
def test_an_empty_prompt_is_refused(prompt: str | None) -> None:
    error = refused(messages=None, prompt=prompt)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt")


def test_half_a_character_is_refused() -> None:
    error = refused(messages=None, prompt="\ud83d")
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt")


def test_images_are_refused() -> None:
    error = refused(media=(b"png",))
    assert (error.code, error.param) == (Code.UNSUPPORTED_MEDIA, "messages")
    assert refused(**{"media": ()}, messages=[]).code is Code.INVALID_REQUEST
    described = Generate(
        incarnation="g",
        id="r",
        sampling=Sampling(seed=1),
        messages=pack([USER]),
        media=[Media(frame=0, mime="image/png", sha256="0")],
    )
    with pytest.raises(RequestError, match="text only"):
        TextPreparer(tokenizer(), RULES).prepare(described, ())


# --- limits --------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    messages = [{"role": "user", "content": "one two three " * 50}]
    count = len(prepare(PromptRules(10_000, 2048, Draw()), messages=messages).tokens)
    error = refused(messages=messages)
    assert error.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert error.param == "messages"
    assert error.message == (
        f"This model's maximum context length is 100 tokens. However, your messages resulted in {count} "
        "tokens. Please reduce the length of the messages."
    )
    raw = refused(messages=None, prompt="one two three " * 50)
    assert raw.param == "prompt"
    assert "your prompt resulted in" in raw.message


def test_the_answer_takes_what_the_context_has_left() -> None:
    length = len(prepare().tokens)
    assert prepare().max_tokens == 100 - length
    assert prepare(max_tokens=5).max_tokens == 5
    assert prepare(max_tokens=5000).max_tokens == 100 - length
    assert prepare(PromptRules(length + 1, 2048, Draw())).max_tokens == 1
    assert refused(rules=PromptRules(length, 2048, Draw())).code is Code.CONTEXT_LENGTH_EXCEEDED
    assert refused(max_tokens=0).param == "max_tokens"


# --- defaults ------------------------------------------------------------------------------------------


def test_what_a_request_leaves_open_is_the_models_choice() -> None:
    rules = PromptRules(100, 2048, Draw(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1))
    assert prepare(rules).draw == Draw(seed=7, temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    chosen = Sampling(seed=8, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    assert prepare(rules, sampling=chosen).draw == Draw(seed=8)


def test_a_repetition_penalty_is_the_models_own_where_none_is_chosen() -> None:
    rules = PromptRules(100, 2048, Draw(repetition_penalty=1.05))
    assert prepare(rules).draw.repetition_penalty == 1.05
    assert prepare(rules, sampling=Sampling(seed=1, repetition_penalty=1.0)).draw.repetition_penalty == 1.0


def test_penalties_biases_and_logprobs_reach_the_draw() -> None:
    sampling = Sampling(
        seed=7,
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={2047: 1.5, 3: -100.0, 5: 0.0},
        logprobs=0,
    )
    assert prepare(sampling=sampling).draw == Draw(
        seed=7,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, -100.0), (2047, 1.5)),
        logprobs=0,
    )
    assert prepare().draw == Draw(seed=7, temperature=1.0)


@pytest.mark.parametrize("token", [-1, 2048, 2**40])
def test_a_bias_for_a_token_that_the_model_has_not_is_refused(token: int) -> None:
    error = refused(sampling=Sampling(seed=1, logit_bias={3: 1.0, token: 1.0}))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "logit_bias")
    assert f"token {token}, " in error.message
    assert "0 to 2047" in error.message


def test_priority_and_deadline_are_passed_on() -> None:
    prepared = prepare(priority=-3, deadline_s=2.5)
    assert (prepared.priority, prepared.deadline_s) == (-3, 2.5)
    assert (prepare().priority, prepare().deadline_s) == (0, None)


def test_a_top_k_as_large_as_the_vocabulary_is_off() -> None:
    assert prepare(sampling=Sampling(seed=1, top_k=2047)).draw.top_k == 2047
    assert prepare(sampling=Sampling(seed=1, top_k=2048)).draw.top_k == 0


@pytest.mark.parametrize(
    ("config", "draw"),
    [
        (None, Draw(temperature=1.0)),
        ({}, Draw(temperature=1.0)),
        ({"do_sample": True, "top_p": None}, Draw(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, Draw(temperature=0.0)),
        ({"do_sample": False, "repetition_penalty": 1.1}, Draw(repetition_penalty=1.1)),
        ({"repetition_penalty": 1.05}, Draw(temperature=1.0, repetition_penalty=1.05)),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "other": [1]},
            Draw(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05),
        ),
    ],
)
def test_defaults_are_those_of_the_models_makers(
    tmp_path: Path, config: dict[str, Any] | None, draw: Draw
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_defaults(tmp_path) == draw


def test_end_tokens_are_the_models_and_the_tokenizers() -> None:
    assert prepare().end_tokens == {1987, 1989}
    assert prepare(ignore_eos=True).end_tokens == frozenset()


def test_stop_strings_are_kept_and_empty_ones_dropped() -> None:
    assert prepare(stop=["END", "", "\n"]).stop == ("END", "\n")


# --- what a template can do ----------------------------------------------------------------------------


def test_the_test_models_template_does_everything() -> None:
    assert probe(tokenizer()) == Capabilities(tools=True, thinking=True, system_in_place=True)


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
        (  # hoists every system message
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            Capabilities(),
        ),
        (  # drops late system messages
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}{{ tools }}",
            Capabilities(tools=True),
        ),
        (  # always thinks
            "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}",
            Capabilities(thinking=True),
        ),
    ],
)
def test_capabilities_are_found_by_trying(
    tmp_path: Path, template: str | None, capabilities: Capabilities
) -> None:
    assert probe(with_template(tmp_path, template)) == capabilities


# --- token ids -----------------------------------------------------------------------------------------


def test_token_ids_are_the_prompt_and_nothing_is_added() -> None:
    prepared = prepare(messages=None, tokens=[5, 1985, 0])
    assert prepared.tokens == (5, 1985, 0)
    assert (prepared.echo, prepared.echo_text, prepared.boundaries) == (False, "", ())


def test_a_token_that_the_model_has_not_is_named_with_its_place() -> None:
    error = refused(messages=None, tokens=[5, 2047, 2048], source="prompt[3]")
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt[3][2]")
    assert "2048" in error.message
    assert "0 to 2047" in error.message
    assert refused(messages=None, tokens=[-1 % 2**31]).param == "prompt[0]"


def test_no_token_ids_are_refused() -> None:
    error = refused(messages=None, tokens=[])
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt")


def test_token_ids_beyond_the_context_are_refused_as_a_text_is() -> None:
    error = refused(messages=None, tokens=[5] * 100, source="prompt[1]")
    assert (error.code, error.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "prompt[1]")
    assert prepare(messages=None, tokens=[5] * 99).max_tokens == 1


def test_an_echo_alone_may_fill_the_whole_context() -> None:
    prepared = prepare(messages=None, tokens=[5] * 100, echo=True, max_tokens=0)
    assert (prepared.max_tokens, prepared.echo) == (0, True)
    error = refused(messages=None, tokens=[5] * 101, echo=True, max_tokens=0)
    assert error.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert refused(messages=None, tokens=[5], max_tokens=0).param == "max_tokens"


def test_what_token_ids_read_is_said_with_the_names_of_special_tokens() -> None:
    text = "<|im_start|>Turntable 駅 🚂"
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert prepare(messages=None, tokens=ids, echo=True).echo_text == text
    assert prepare(messages=None, tokens=[*ids, 2040], echo=True).echo_text == text
    assert prepare(messages=None, prompt=text, echo=True).echo_text == ""


def test_an_echo_says_how_much_its_client_has() -> None:
    assert prepare(messages=None, tokens=[5, 6, 7], echo=True, scored=2).scored == 2


# --- taken apart only ----------------------------------------------------------------------------------

ALL = Tokenizing(tokens=True, pieces=True)


def test_a_conversation_is_counted_as_it_is_run() -> None:
    run = prepare(replace(RULES, context_length=1000), tools=[TOOL])
    counted = tokenize(ALL, messages=[USER], tools=[TOOL])
    assert counted.count == len(run.tokens)
    assert counted.tokens == run.tokens
    assert counted.pieces == tuple(tokenizer().convert_ids_to_tokens(list(run.tokens)))
    assert tokenize(Tokenizing(), messages=[USER], tools=[TOOL]) == Tokenized(id="r", count=counted.count)


def test_a_turn_that_is_not_opened_is_counted_without_its_opening() -> None:
    opened, bare = (tokenize(Tokenizing(tokens=True, opens_turn=on), messages=[USER]) for on in (True, False))
    assert 0 < bare.count < opened.count
    assert opened.tokens[: bare.count] == bare.tokens


def test_a_prompt_longer_than_the_context_is_counted() -> None:
    assert tokenize(Tokenizing(), prompt="word " * 500).count > RULES.context_length
    assert tokenize(Tokenizing(), prompt="").count == 0


@pytest.mark.parametrize("special", [True, False])
def test_what_the_tokenizer_puts_around_a_text_is_put_if_asked_for(special: bool) -> None:
    wanted = Tokenizing(tokens=True, special=special)
    assert list(tokenize(wanted, prompt="Hello!").tokens) == tokenizer().encode(
        "Hello!", add_special_tokens=special
    )


def test_tokens_are_told_as_text() -> None:
    tokens = tokenizer().encode("Hello, 駅!")
    assert tokenize(Tokenizing(), tokens=tokens, echo=True).text == tokenizer().decode(tokens)
    with pytest.raises(RequestError) as caught:
        tokenize(Tokenizing(), tokens=[1, 99999], source="tokens")
    assert caught.value.param == "tokens[1]"


def test_a_refusal_for_length_tells_its_numbers() -> None:
    error = refused(messages=[{"role": "user", "content": "word " * 500}])
    assert error.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert error.details["context_length"] == RULES.context_length
    assert f"resulted in {error.details['prompt_tokens']} tokens" in error.message
