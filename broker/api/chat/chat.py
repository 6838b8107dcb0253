"""OpenAI chat completions: body -> `Generate`, and the renderer of a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from broker.api.chat.body import Body
from broker.dialects.body import encode, encode_text
from broker.dialects.custom import InputReader
from broker.dialects.logprobs import chat_logprobs
from broker.dialects.normalize import Conversation, normalize, prompt_end_options
from broker.dialects.parameters import sampling, sparse_of, stop_strings, token_limit
from broker.dialects.reasoning import options
from broker.dialects.response_format import form_of
from broker.dialects.sessions import name_conversation
from broker.dialects.tools import as_text, is_whole
from protocol.conversation import pack
from protocol.messages import Accepted, Generate, PromptLogprobs
from protocol.types import CallDelta, Delta, Media

# --- to the worker -----------------------------------------------------------------------------------


def conversation(body: Body, *, system_in_place: bool) -> Conversation:
    """Return the canonical conversation of a checked body."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(body.messages)
    return normalize(messages, system_in_place=system_in_place)


def generate(
    body: Body, messages: list[dict[str, Any]], media: list[Media], *, id: str, incarnation: str
) -> Generate:
    """Make the request to the worker for the first choice. Raises `RequestError` if it cannot be encoded."""
    offer = body.offer
    reasoning = options(body)
    wishes = reasoning.template_kwargs | prompt_end_options(
        messages, continues=body.continue_final_message, opens=body.add_generation_prompt
    )
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=sampling(body, (body.top_logprobs or 0) if body.logprobs else None),
        messages=pack(messages),
        tools=pack(offer.tools) if offer.tools else UNSET,
        template_kwargs=pack(wishes) if wishes else UNSET,
        media=media,
        stop=stop_strings(body),
        max_tokens=token_limit(body.max_completion_tokens or body.max_tokens),
        ignore_eos=bool(body.ignore_eos),
        priority=body.priority or 0,
        cache_salt=body.salt,
        session=body.prompt_cache_key or name_conversation(messages),
        cache_pin=bool(body.cache_pin),
        thinking_budget=reasoning.budget_tokens,
        speculation=body.speculation is not False,
        sparse=sparse_of(body.sparse_prefill),
        prediction=body.prediction.text if body.prediction else "",
        form=form_of(body),
        calling=offer.calling,
    )


# --- to the client -----------------------------------------------------------------------------------


class ChatChoiceRenderer:
    """`answer.ChoiceRenderer` of chat completions."""

    def __init__(
        self, *, logprobs: bool, functions: bool = False, customs: frozenset[str] = frozenset()
    ) -> None:
        """`logprobs`: whether they were requested. `functions`: render calls as legacy function calls.
        `customs`: names of the custom tools."""
        self._logprobs = logprobs
        self._functions = functions
        self._streamed: dict[int, dict[int, list[str]]] = {}
        """Arguments by choice and call."""
        self._customs = customs
        self._inputs: dict[tuple[int, int], InputReader] = {}
        """Inputs of custom tools by choice and call."""

    def add_prompt(self, choice: int, item: Accepted | PromptLogprobs) -> None:
        """Ignore prompt information, which chat completions do not show."""

    def opening(self, choice: int) -> bytes:
        return _entry(choice, {"role": "assistant", "content": ""})

    def gain(self, choice: int, delta: Delta) -> bytes:
        if delta.likelihoods or delta.reasoning or delta.calls:
            return self._mixed(choice, delta)
        if not delta.text:
            return b""
        # Formatted by hand, since most events are of this kind.
        text = encode_text(delta.text)
        return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice, text)

    def _mixed(self, choice: int, delta: Delta) -> bytes:
        shown: dict[str, Any] = _reasoning(delta.reasoning)
        if delta.text or delta.likelihoods:
            shown["content"] = delta.text
        if delta.calls:
            grown = self._joined(delta.calls)
            shown |= self._calls(choice, grown, numbered=True)
            arguments = self._streamed.setdefault(choice, {})
            for call in grown:
                arguments.setdefault(call.index, []).append(call.arguments)
        return _entry(choice, shown, logprobs=chat_logprobs(delta.likelihoods) if delta.likelihoods else None)

    def _joined(self, growths: Iterable[CallDelta]) -> list[CallDelta]:
        """Merge the deltas of each call. Legacy function calling allows one call."""
        return _joined(growth for growth in growths if not (self._functions and growth.index))

    def _calls(self, choice: int, calls: Sequence[CallDelta], *, numbered: bool) -> dict[str, Any]:
        """Return the fields of a message or a delta that hold the calls; empty if there are none."""
        if self._functions:
            return {"function_call": _call(calls[0])["function"]} if calls else {}
        shown = [self._call(choice, call, numbered=numbered) for call in calls]
        return {"tool_calls": shown} if shown else {}

    def _call(self, choice: int, growth: CallDelta, *, numbered: bool) -> dict[str, Any]:
        """Return the entry of a call, which has the text of the input if the tool is a custom one."""
        number = {"index": growth.index} if numbered else {}
        if growth.id and growth.name in self._customs:
            self._inputs[choice, growth.index] = InputReader()
        if (reader := self._inputs.get((choice, growth.index))) is None:
            return number | _call(growth)
        begun = {"id": growth.id, "type": "custom"} if growth.id else {}
        name = {"name": growth.name} if growth.id else {}
        text = reader.push(growth.arguments) + ("" if numbered else reader.close())
        return {**number, **begun, "custom": {**name, "input": text}}

    def _rest(self, choice: int) -> dict[str, Any]:
        """Return the last delta: inputs of a form that could not be read while they were streamed."""
        rests = {index: reader.close() for (of, index), reader in self._inputs.items() if of == choice}
        shown = [{"index": index, "custom": {"input": rest}} for index, rest in rests.items() if rest]
        return {"tool_calls": shown} if shown else {}

    def _reason(self, reason: str) -> str:
        return "function_call" if self._functions and reason == "tool_calls" else reason

    def closing(self, choice: int, reason: str) -> bytes:
        """A call that broke off, and whose fragments the client has, is none: the reason says so."""
        streamed = self._streamed.get(choice, {}).values()
        if reason == "tool_calls" and not all(is_whole("".join(parts)) for parts in streamed):
            reason = "stop"
        return _entry(choice, self._rest(choice), reason=self._reason(reason))

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        thought = "".join(delta.reasoning for delta in deltas)
        called = self._joined(call for delta in deltas for call in delta.calls)
        cut = called[-1:] if reason == "length" else []
        broken = [call for call in called if not is_whole(call.arguments) and call not in cut]
        text += "".join(as_text(call.name, call.arguments) for call in broken)
        calls = self._calls(choice, [call for call in called if call not in broken], numbered=False)
        likelihoods = [of for delta in deltas for of in delta.likelihoods]
        message = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
            **_reasoning(thought),
            **calls,
        }
        return {
            "index": choice,
            "message": message,
            "logprobs": chat_logprobs(likelihoods) if self._logprobs else None,
            "finish_reason": self._reason(reason),
        }


def _joined(growths: Iterable[CallDelta]) -> list[CallDelta]:
    """Merge the deltas of each call, in order: SDKs accept only one entry per call in a chunk."""
    calls: dict[int, list[CallDelta]] = {}
    for growth in growths:
        calls.setdefault(growth.index, []).append(growth)
    return [
        replace(parts[0], arguments="".join(part.arguments for part in parts)) for parts in calls.values()
    ]


def _call(growth: CallDelta) -> dict[str, Any]:
    """Return the entry of a call. Id, type and name are in its first delta only."""
    begun: dict[str, Any] = {"id": growth.id, "type": "function"} if growth.id else {}
    name = {"name": growth.name} if growth.id else {}
    return {**begun, "function": {**name, "arguments": growth.arguments}}


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients use; empty if there is none."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _entry(
    choice: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> bytes:
    return encode({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})
