"""Reasoning over HTTP: the embedded model, with reasoning on request, and one whose prompts start it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.models.fixtures import model_folder
from tests.system import System, chat_body, eventually, running_system, sse_documents

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QUESTION = "Repeat: Quito"
THOUGHT, CONTENT = "I repeat the text as it is.\n", "\n\nQuito"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    thinker = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(model_folder("dense"), thinker)
    (thinker / "chat_template.jinja").write_text(TEMPLATE)
    with running_system(tmp_path_factory.mktemp("reasoning")) as system:
        system.start_worker(module="worker")
        system.start_worker("--model", str(thinker), module="worker")
        for name in ("pocket", "thinker"):
            body = chat_body("hi", model=name, max_tokens=1)
            eventually(
                lambda body=body: system.http.post("/v1/chat/completions", json=body).status_code == 200,
                within_s=90,
                what=f"{name} serves",
            )
        yield system


@dataclass
class Answer:
    """A choice, from a stream or a document."""

    reasoning: str = ""
    content: str = ""
    reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or {}
        assert said.get("reasoning") == said.get("reasoning_content")
        self.reasoning += said.get("reasoning_content") or ""
        self.content += said.get("content") or ""
        self.reason = choice["finish_reason"] or self.reason
        self.entries += (choice["logprobs"] or {}).get("content", [])


def ask(system: System, text: str = QUESTION, **fields: Any) -> Answer:
    """Return the answer, which must be equal in a stream and a document."""
    fields = {"model": "pocket"} | fields
    reply = system.http.post("/v1/chat/completions", json=chat_body(text, **fields))
    assert reply.status_code == 200, reply.text
    whole = Answer(usage=reply.json()["usage"])
    whole.take(reply.json()["choices"][0])
    streamed = Answer()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = system.http.post("/v1/chat/completions", json=chat_body(text, **fields, **options))
    *events, done = sse_documents(iter(reply.text.split("\n")))
    assert done == "[DONE]"
    for event in map(json.loads, events):
        streamed.usage = event["usage"] or streamed.usage
        for choice in event["choices"]:
            streamed.take(choice)
    for usage in (whole.usage, streamed.usage):
        del usage["prompt_tokens_details"]  # the second is served from the cache
    assert streamed == whole
    return whole


def thought_tokens(answer: Answer) -> int:
    return int(answer.usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0))


def test_a_thought_is_told_apart_when_it_is_asked_for(system: System) -> None:
    answer = ask(system, enable_thinking=True)
    assert (answer.reasoning, answer.content, answer.reason) == (THOUGHT, CONTENT, "stop")
    assert 0 < thought_tokens(answer) < answer.usage["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
    ],
)
def test_reasoning_is_absent_when_not_enabled(system: System, fields: dict[str, Any]) -> None:
    answer = ask(system, **fields)
    assert (answer.reasoning, answer.content) == ("", "Quito")
    assert "completion_tokens_details" not in answer.usage


def test_a_reply_cut_within_its_thought_is_well_formed(system: System) -> None:
    for tokens in range(1, 11):
        answer = ask(system, enable_thinking=True, max_tokens=tokens)
        assert THOUGHT.startswith(answer.reasoning)
        assert (answer.content, answer.reason, thought_tokens(answer)) == ("", "length", tokens)


def test_stop_strings_count_in_the_content_only(system: System) -> None:
    answer = ask(system, enable_thinking=True, stop=["text", "ito"])
    assert (answer.reasoning, answer.content, answer.reason) == (THOUGHT, "\n\nQu", "stop")


def test_log_probabilities_are_those_of_the_content(system: System) -> None:
    answer = ask(system, enable_thinking=True, logprobs=True)
    assert "".join(entry["token"] for entry in answer.entries) == answer.content == CONTENT


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget"])
def test_a_thought_is_closed_when_it_has_its_tokens(system: System, name: str) -> None:
    whole = ask(system, enable_thinking=True)
    for budget in range(1, thought_tokens(whole)):
        answer = ask(system, enable_thinking=True, **{name: budget})
        assert thought_tokens(answer) == budget
        assert THOUGHT.startswith(answer.reasoning)
        assert answer.content.startswith("\n\n")
    assert ask(system, enable_thinking=True, **{name: thought_tokens(whole)}) == whole


def test_a_thought_that_the_prompt_opens_is_one(system: System) -> None:
    answer = ask(system, "Hello", model="thinker", max_tokens=30, ignore_eos=True, temperature=0)
    assert answer.reasoning
    assert (answer.content, answer.reason) == ("", "length")
    limited = ask(
        system, "Hello", model="thinker", max_tokens=30, ignore_eos=True, temperature=0, thinking_budget=7
    )
    assert answer.reasoning.startswith(limited.reasoning)
    assert limited.content
    assert thought_tokens(limited) == 7


def test_raw_completions_have_no_channels(system: System) -> None:
    prompt = "<|im_start|>user\nRepeat: Quito<|im_end|>\n<|im_start|>assistant\n<think>\n"
    body = {"model": "pocket", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    choice = system.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == f"{THOUGHT}</think>{CONTENT}"


def test_reasoning_can_be_sent_back_under_either_name(system: System) -> None:
    def prompt_tokens(**thought: str) -> int:
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "Quito", **thought},
        ]
        reply = system.http.post("/v1/chat/completions", json={"model": "pocket", "messages": messages})
        return int(reply.json()["usage"]["prompt_tokens"])

    assert prompt_tokens(reasoning_content=THOUGHT) == prompt_tokens(reasoning=THOUGHT) > prompt_tokens()


def test_the_openai_client_reads_the_thought(system: System) -> None:
    with openai.OpenAI(base_url=system.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        reply = client.chat.completions.create(
            model="pocket",
            messages=[{"role": "user", "content": QUESTION}],
            extra_body={"enable_thinking": True},
        )
    assert getattr(reply.choices[0].message, "reasoning_content", None) == THOUGHT
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 10
