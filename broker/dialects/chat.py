"""OpenAI chat completions: body -> Generate, and how a choice looks in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.dialects.body import encode, encode_text
from broker.dialects.chat_body import Body
from broker.dialects.logprobs import chat_logprobs
from broker.dialects.normalize import Conversation, normalize
from broker.dialects.parameters import sampling, stop_strings
from protocol.messages import Accepted, Generate, Scored
from protocol.parts import Delta, Media

# --- to the worker -----------------------------------------------------------------------------------


def conversation(body: Body, *, system_in_place: bool) -> Conversation:
    """The canonical conversation of a checked request."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(body.messages)
    return normalize(messages, system_in_place=system_in_place)


def generate(
    body: Body, messages: list[dict[str, Any]], media: list[Media], *, id: str, incarnation: str
) -> Generate:
    """The message to the worker, for the first choice."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        kwargs.setdefault("enable_thinking", body.enable_thinking)
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=sampling(body, (body.top_logprobs or 0) if body.logprobs else None),
        messages=messages,
        tools=_offered_tools(body),
        template_kwargs=kwargs,
        media=media,
        stop=stop_strings(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        ignore_eos=bool(body.ignore_eos),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        cache_pin=bool(body.cache_pin),
    )


def _offered_tools(body: Body) -> list[dict[str, Any]] | None:
    if body.tool_choice == "none" or not body.tools:
        return None
    offered = []
    for tool in body.tools:
        if tool.type == "function" and tool.function is not None:
            function = {"name": tool.function.name}
            fields = {"description": tool.function.description, "parameters": tool.function.parameters}
            offered.append(
                {
                    "type": "function",
                    "function": function | {k: v for k, v in fields.items() if v is not None},
                }
            )
    return offered or None


# --- to the client -----------------------------------------------------------------------------------


class Form:
    """`answer.Form` of chat completions."""

    def __init__(self, *, logprobs: bool) -> None:
        """`logprobs`: whether they were asked for."""
        self._logprobs = logprobs

    def hear(self, choice: int, item: Accepted | Scored) -> None:
        """Nothing of it is shown."""

    def opening(self, choice: int) -> bytes:
        return _entry(choice, {"role": "assistant", "content": ""})

    def gain(self, choice: int, delta: Delta) -> bytes:
        if delta.likelihoods:
            return _entry(choice, {"content": delta.text}, logprobs=chat_logprobs(delta.likelihoods))
        if not delta.text:
            return b""
        # By hand, since most events are of this kind.
        text = encode_text(delta.text)
        return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice, text)

    def closing(self, choice: int, reason: str) -> bytes:
        return _entry(choice, {}, reason=reason)

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        likelihoods = [of for delta in deltas for of in delta.likelihoods]
        return {
            "index": choice,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(likelihoods) if self._logprobs else None,
            "finish_reason": reason,
        }


def _entry(
    choice: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> bytes:
    return encode({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})
