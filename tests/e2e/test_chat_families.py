"""Each chat family in each dialect: three turns with a thought, a text, a call and its result.

All but sockets and weights is real: requests of the clients' own libraries pass the gateway and become a
prompt by the family's template and tokenizer, and the tokens of an answer as the family writes it come back.
So every family is tried in every dialect, at the cost of neither processes nor models.
"""

from __future__ import annotations

import asyncio
import json
from functools import reduce
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from protocol.messages import StepOutputs
from tests.broker.application import House
from tests.broker.asgi import run, until
from tests.factories import accepted, delta, finished, reused
from tests.models.chat_families import ARGUMENTS, BESIDE, FAMILIES, NAME, THOUGHT, Family
from tests.worker.input.prompts.test_format import RULES
from tests.worker.output.calls.parsed_answers import bare_tokenizer
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.input.prompts.template import probe, template_of
from worker.load.text import OutputProcessors
from worker.values import OutputDelta

SYSTEM, QUESTION, RESULT, ANSWER, AGAIN = "Be terse.", "How is Quito?", "14 degrees", "Cold.", "On Sunday?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat.completions": (
        {"tools": [{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}]},
        {"role": "tool", "tool_call_id": "ID", "content": RESULT}),
    "messages": (
        {"tools": [{"name": NAME, "input_schema": SCHEMA}], "system": SYSTEM, "max_tokens": 2000,
         "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "ID", "content": RESULT}]}),
    "responses": (
        {"tools": [{"type": "function", "name": NAME, "parameters": SCHEMA}], "instructions": SYSTEM},
        {"type": "function_call_output", "call_id": "ID", "output": RESULT}),
}  # fmt: skip
"""What clients send beside the conversation, and behind a call, by their methods."""


class Model:
    """A family's tokenizer, template and parsers behind a gateway, without a network."""

    def __init__(self, family: Family, folder: Path, rules: PromptRules = RULES) -> None:
        backend, (special, words) = bare_tokenizer(), family.tokens
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        backend.add_tokens([AddedToken(token, normalized=False) for token in words])
        kind = "chat_template" if "{" in family.template else "chat_template_type"
        PreTrainedTokenizerFast(tokenizer_object=backend, **{kind: family.template}).save_pretrained(folder)
        self.family, self.tokenizer, self.house = family, open_tokenizer(folder, []), House()
        self.preparer, self.processors = TextPreparer(self.tokenizer, rules), OutputProcessors(self.tokenizer)
        able = probe(template_of(self.tokenizer), self.tokenizer)
        self.layout = able.layout
        self.house.line.serving("w", "m", capabilities=able)

    async def answer(
        self, number: int, text: str, calls: str, *, whole: bool, max_tokens: int | None = None
    ) -> str:
        """Answer a request, token by token or in one piece, and return its prompt. A thought that the prompt
        begins is not begun again. `max_tokens`: cuts the answer."""
        await until(lambda: len(self.house.requests()) > number)
        asked = self.house.requests()[number]
        prepared = self.preparer.prepare(asked, ())
        prompt = str(self.tokenizer.decode(list(prepared.tokens)))
        said = calls if calls and self.family.is_bare else self.family.said.format(THOUGHT, text) + calls
        start = self.family.said.partition("{0}")[0].strip()
        if start and prompt.rstrip().endswith(start):
            said = said.lstrip().removeprefix(start)
        processor = self.processors.open(prepared)
        tokens = self.tokenizer.encode(said, add_special_tokens=False)[:max_tokens]
        grown = [*map(processor.push, tokens), processor.flush(has_ended=max_tokens is None)]
        deltas = [
            delta(each.text, asked.id, sequence=place, reasoning=each.reasoning, calls=list(each.calls))
            for place, each in enumerate([reduce(OutputDelta.then, grown)] if whole else grown)
        ]
        reason = "length" if max_tokens is not None else "tool_calls" if processor.has_called else "stop"
        ends = finished("w", asked.id, reason=reason)
        outputs = StepOutputs(incarnation="w", deltas=deltas)
        self.house.line.say("w", accepted("w", asked.id), reused("w", asked.id), outputs, ends)
        return prompt


def read(answer: Any) -> tuple[list[str], list[Any], list[Any]]:
    """Return thought and text, the calls, and what the client puts into the history."""
    if hasattr(answer, "choices"):
        back = [answer.choices[0].message.to_dict()]
        calls = [call["function"] | {"id": call["id"]} for call in back[0].get("tool_calls") or []]
        texts = [back[0].get(key) or "" for key in ("reasoning_content", "content")]
    elif hasattr(answer, "output"):
        back = [item.to_dict() for item in answer.output]
        calls = [item | {"id": item["call_id"]} for item in back if item["type"] == "function_call"]
        parts = [part for item in back for part in item.get("content", [])]
        kinds = ("reasoning_text", "output_text")
        texts = ["".join(part["text"] for part in parts if part["type"] == kind) for kind in kinds]
    else:
        blocks = [block.to_dict() for block in answer.content]
        calls = [block | {"arguments": json.dumps(block["input"])} for block in blocks if "input" in block]
        texts = ["".join(block.get(key, "") for block in blocks) for key in ("thinking", "text")]
        back = [{"role": "assistant", "content": blocks}]
    return texts, calls, back


async def ask(app: Any, dialect: str, history: list[Any], *, whole: bool, **more: Any) -> Any:
    """Return the document of an answer, or the one that the client's library makes of a stream."""
    http, is_claude = httpx2.AsyncClient(transport=httpx2.ASGITransport(app)), dialect == "messages"
    sdk: Any = anthropic.AsyncAnthropic if is_claude else openai.AsyncOpenAI
    url = "http://127.0.0.1:8000" + "/v1" * (not is_claude)
    api = reduce(getattr, dialect.split("."), sdk(api_key="x", base_url=url, http_client=http, max_retries=0))
    under = "input" if dialect == "responses" else "messages"
    asked = {"model": "m", under: history, **DIALECTS[dialect][0], **more}
    if whole:
        return await api.create(**asked)
    async with api.stream(**asked) as stream:
        if dialect == "responses":  # this library refuses incomplete ones at the end of a stream
            return [event async for event in stream][-1].response
        try:
            return await getattr(stream, f"get_final_{'message' if is_claude else 'completion'}")()
        except openai.LengthFinishReasonError as error:
            return error.completion


async def converse(model: Model, dialect: str, *, whole: bool) -> tuple[list[Any], str]:
    """Ask, be called, give the result and ask again; return what was read, and the last prompt."""
    family, answers, prompts = model.family, list[Any](), list[str]()
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    if dialect == "chat.completions":
        history.insert(0, {"role": "system", "content": SYSTEM})

    async def turn(text: str, calls: str, *shown: str) -> str:
        asking = asyncio.ensure_future(ask(model.house.app, dialect, history, whole=whole))
        prompt = await model.answer(len(model.house.requests()), text, calls, whole=whole)
        assert [part for part in shown if part not in prompt] == []
        texts, calls_read, back = read(await asking)
        called = [(call["name"], json.loads(call["arguments"])) for call in calls_read]
        spoken = not (calls and family.is_bare)
        assert [each.strip() for each in texts] == [THOUGHT * ("{0}" in family.said) * spoken, text * spoken]
        assert called == ([(NAME, ARGUMENTS)] if calls else [])
        history.extend(back)
        answers.append((texts, called))
        prompts.append(prompt)
        return "".join(call["id"] for call in calls_read)

    id = await turn(BESIDE, family.writes, SYSTEM, QUESTION, *[NAME] * (family.omits != "tools"))
    beside = [BESIDE] * (family.omits != "beside" and not family.is_bare)
    shown = (SYSTEM, QUESTION, *beside, NAME, *map(str, ARGUMENTS.values()), RESULT)
    history.append(json.loads(json.dumps(DIALECTS[dialect][1]).replace("ID", id)))
    keeps = family.thought or "thinking" in family.beside + family.own
    await turn(ANSWER, "", *shown, *[THOUGHT] * bool(keeps))
    history.append({"role": "user", "content": AGAIN})
    await turn(ANSWER, "", *shown, ANSWER, AGAIN)
    return answers, prompts[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_a_call_is_whole_in_every_dialect(name: str, tmp_path: Path) -> None:
    model = Model(FAMILIES[name], tmp_path)

    async def talk() -> None:
        prompts = set()
        for dialect in DIALECTS:
            answers, prompt = await converse(model, dialect, whole=True)
            assert await converse(model, dialect, whole=False) == (answers, prompt)
            prompts.add(prompt)
        # Prefixes are shared, unless the template has a switch, which messages turn on.
        assert len(prompts) == 1 or "thinking" in model.family.template

    run(talk())
    model.house.close()
