"""What a chat template wants of messages: found once by probing, and met by one adapter.

A chat template is a program, written for the messages of its authors' own client. Some concatenate a call's
arguments, others iterate over them; some know no system role, or one call a message. The gateway's canonical
form (`broker.dialects.normalize`) suits most. For the others a fixed set of conversations is rendered in
several layouts: a layout is right if the text contains what was put in. Where the canonical one does, nothing
is changed, so that the prompt is that of upstream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, takewhile
from typing import Any

from protocol.arguments import object_in
from worker.input.prompts.boundaries import Messages

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Attempt = Callable[["Wants", Messages, Mapping[str, Any]], str]
"""Renders messages in a layout, with options; returns an empty string if the template raises."""

SYSTEM = {"role": "system", "content": "first-instruction"}
USER = {"role": "user", "content": "first-question"}
ANSWER = {"role": "assistant", "content": "first-answer"}
LATE_USER = {"role": "user", "content": "late-question"}
THOUGHT = "first-thought"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
"""Keys under which templates look for the reasoning of an answer; the first is the canonical one."""
THOUGHT_PARTS = "content"
"""Stands for a key: the reasoning is a part of the content, of the type `thinking`."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TOOL_NAME = "probe_tool"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SHORT_LENGTH = 9
_SHORT_IDS, _LONG_ID = ("abcdefgh0", "abcdefgh1"), "call_0123456789abcdef01234567"


def _calling(*ids: str, cut: str = "") -> Message:
    calls = [
        {
            "type": "function",
            "id": id,
            "function": {"name": f"{TOOL_NAME}_{number}", "arguments": cut or {"alpha": f"value-{number}"}},
        }
        for number, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(id: str, text: str) -> Message:
    return {"role": "tool", "name": TOOL_NAME, "tool_call_id": id, "content": text}


_BARE: Message = {"role": "assistant", "content": ""}
_BESIDE = "text-beside"
CALLED = (_calling(_LONG_ID), _result(_LONG_ID, "result-0"))
_CUT = '{"alpha" :"value-0'
"""Arguments that broke off, with a space where no template writes one."""
_CUT_CALLED = (_calling(_LONG_ID, cut=_CUT), CALLED[1])
_CALL_SHOWN = (f"{TOOL_NAME}_0", "value-0", "result-0")
_TWO = (_calling(*_SHORT_IDS), *(_result(id, f"result-{place}") for place, id in enumerate(_SHORT_IDS)))
_TWO_SHOWN = (*_CALL_SHOWN, f"{TOOL_NAME}_1", "value-1", "result-1")


@dataclass(frozen=True, slots=True)
class Wants:
    """Layout of messages, as differences from the canonical form.

    * `splits_contents`: contents are lists of parts, also of text alone.
    * `joins_system`: there is no system role; its text comes before that of the first user.
    * `inserts_user`: a conversation needs a user's message at its beginning (`first`) or anywhere (`any`).
    * `between`: text of an answer that is put before a user message behind a tool's result or another one.
    * `writes_calls`: there are no calls; they and their results become text.
    * `splits_calls`: an answer has one call at most.
    * `text_arguments`: a call's arguments are JSON text, not an object.
    * `takes_cut_text`: arguments that are no object may be any text, and are written as they are.
    * `null_contents`: the content beside calls must be null.
    * `parts_calls`: a text beside calls needs an answer of its own, before them.
    * `short_ids`: ids of calls have nine letters or digits (Mistral).
    * `named_ids`: ids of calls are `functions.name:number`, and the name is in no other place (Kimi).
    * `thoughts_under`, `thinking_under`: names of an answer's reasoning, and of the option that enables it.
    * `efforts`: the values of `reasoning_effort` that are accepted; None: all.
    * `takes_budget`: the option `thinking_budget` is accepted.
    """

    splits_contents: bool = False
    joins_system: bool = False
    inserts_user: str = ""
    between: str | None = None
    writes_calls: bool = False
    splits_calls: bool = False
    text_arguments: bool = False
    takes_cut_text: bool = True
    null_contents: bool = False
    parts_calls: bool = False
    short_ids: bool = False
    named_ids: bool = False
    thoughts_under: str = THOUGHT_KEYS[0]
    thinking_under: str = "enable_thinking"
    efforts: tuple[str, ...] | None = None
    takes_budget: bool = True


def differences(wants: Wants) -> list[str]:
    """Return the names of what differs from the canonical form, each with its value unless it is yes."""
    changed = {
        field.name: value for field in fields(wants) if (value := getattr(wants, field.name)) != field.default
    }
    return [name if value is True else f"{name}={value}" for name, value in changed.items()]


# --- probing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Probe:
    """`shown`: what the text of one of the conversations must contain. `changes`: layouts that are tried in
    this order, if the present one does not show it. `hidden`: what it must not contain."""

    conversations: tuple[Messages, ...]
    shown: tuple[str, ...]
    changes: tuple[Mapping[str, Any], ...]
    hidden: tuple[str, ...] = ()


_CALL_CHANGES = (
    *(
        dict.fromkeys(names, True)
        for count in (1, 2, 3)
        for names in combinations(("short_ids", "text_arguments", "null_contents"), count)
    ),
    {"named_ids": True},
)
HIDDEN = ANSWER | {THOUGHT_KEYS[0]: THOUGHT}

_PROBES = (
    _Probe(([USER],), ("first-question",), ({"splits_contents": True},)),
    _Probe(([SYSTEM, USER],), ("first-instruction", "first-question"), ({"joins_system": True},)),
    _Probe(([USER, *CALLED],), _CALL_SHOWN, _CALL_CHANGES),
    _Probe(([USER, *CALLED],), (f"{TOOL_NAME}_0", "result-0"), (*_CALL_CHANGES, {"writes_calls": True})),
    _Probe(([USER, *_TWO],), _TWO_SHOWN, ({"splits_calls": True},)),
    _Probe(([SYSTEM, *CALLED],), _CALL_SHOWN, ({"inserts_user": "any"},)),
    _Probe(([ANSWER, LATE_USER],), ("first-answer", "late-question"), ({"inserts_user": "first"},)),
    _Probe(([USER, *CALLED, LATE_USER],), ("result-0", "late-question"), ({"between": ""}, {"between": " "})),
    _Probe(
        ([USER, HIDDEN], [USER, {**CALLED[0], THOUGHT_KEYS[0]: THOUGHT}, CALLED[1]]),
        (THOUGHT,),
        tuple({"thoughts_under": key} for key in (*THOUGHT_KEYS[1:], THOUGHT_PARTS)),
        hidden=("'thinking'", '"thinking"'),  # a content written as it is, with the names of its parts
    ),
    _Probe(
        (
            [
                USER,
                {**CALLED[0], "content": _BESIDE, THOUGHT_KEYS[0]: THOUGHT},
                CALLED[1],
                ANSWER,
                LATE_USER,
            ],
        ),
        (*_CALL_SHOWN, _BESIDE, "first-answer", "late-question"),
        ({"parts_calls": True},),
    ),
)


def find_wants(attempt: Attempt) -> Wants:
    """Return the layout of messages, and the options, that a template wants."""
    wants = Wants()
    for probe in _PROBES:
        layouts = (replace(wants, **change) for change in ({}, *probe.changes))
        wants = next((layout for layout in layouts if _shows(attempt, layout, probe)), wants)

    def told(**options: Any) -> str:
        return attempt(wants, [USER], options)

    efforts = tuple(effort for effort in EFFORTS if told(reasoning_effort=effort))
    renames = told(enable_thinking=True) == told(enable_thinking=False)
    renames = renames and told(thinking=True) != told(thinking=False)
    return replace(
        wants,
        thinking_under="thinking" if renames else wants.thinking_under,
        efforts=None if efforts == EFFORTS else efforts,
        takes_budget=bool(told(thinking_budget=1024)),
        takes_cut_text=_CUT in attempt(wants, [USER, *_CUT_CALLED], {}),
    )


def _shows(attempt: Attempt, layout: Wants, probe: _Probe) -> bool:
    texts = (attempt(layout, messages, {}) for messages in probe.conversations)
    return any(
        all(part in text for part in probe.shown) and not any(part in text for part in probe.hidden)
        for text in texts
    )


# --- options -----------------------------------------------------------------------------------------


def fit_options(options: Mapping[str, Any], wants: Wants) -> dict[str, Any]:
    """Return the options under the names and with the values that the template knows. Most templates ignore
    unknown ones; upstream's own renderers raise."""
    fitted = dict(options)
    if not wants.takes_budget:
        fitted.pop("thinking_budget", None)
    if "enable_thinking" in fitted:
        fitted.setdefault(wants.thinking_under, fitted["enable_thinking"])
    effort = fitted.get("reasoning_effort")
    if wants.efforts is not None and effort in EFFORTS:
        del fitted["reasoning_effort"]
        if wants.efforts:
            fitted["reasoning_effort"] = _nearest(effort, wants.efforts)
    return fitted


def _nearest(effort: str, accepted: Sequence[str]) -> str:
    """Return the effort that is accepted and nearest, of two the higher one; `none` only for itself."""
    if effort in accepted:
        return effort
    wanted = EFFORTS.index(effort)
    places = [EFFORTS.index(each) for each in accepted if each != "none"] or [0]
    return EFFORTS[min(places, key=lambda place: (abs(place - wanted), -place))]


# --- messages ----------------------------------------------------------------------------------------


def complete(tools: Tools | None) -> list[Mapping[str, Any]] | None:
    """Return the tools, each with the schema of its parameters, which clients may leave out."""
    return None if tools is None else [_with_parameters(tool) for tool in tools]


def _with_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("parameters") is not None:
        return tool
    return {**tool, "function": function | {"parameters": {"type": "object", "properties": {}}}}


def lay_out(messages: Messages, wants: Wants) -> Messages:
    """Return canonical messages in the layout that a template wants."""
    if wants.joins_system:
        messages = _join_system(messages)
    if wants.inserts_user:
        messages = _insert_user(messages, wants.inserts_user)
    if wants.writes_calls:
        messages = _write_calls(messages)
    if wants.parts_calls or wants.null_contents:
        messages = [*_part_calls(messages)]
    if wants.named_ids:
        messages = [*_name_ids(messages)]
    if wants.splits_calls:
        messages = [*_split_calls(messages)]
    if wants.between is not None:
        messages = [*_answer_results(messages, wants.between)]
    return [_lay_out_one(message, wants) for message in messages]


def _joined(text: str, content: Any) -> Any:
    """Put a text before a content."""
    if isinstance(content, list):
        return [{"type": "text", "text": f"{text}\n\n"}, *content]
    return f"{text}\n\n{content}" if content and text else content or text


def _join_system(messages: Messages) -> Messages:
    if not messages or messages[0].get("role") != "system":
        return messages
    text, rest = messages[0].get("content") or "", list(messages[1:])
    if rest and rest[0].get("role") == "user":
        return [{**rest[0], "content": _joined(text, rest[0].get("content"))}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _insert_user(messages: Messages, where: str) -> Messages:
    roles = [message.get("role") for message in messages]
    first = int(roles[:1] == ["system"])
    if "user" in (roles[first : first + 1] if where == "first" else roles):
        return messages
    return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]


def _write_calls(messages: Messages) -> Messages:
    """Write calls and results as Hermes' models do; results and the question behind them are one message."""
    written: list[Message] = []
    for message in messages:
        spoken = _written(message)
        if written and spoken.get("role") == written[-1].get("role") == "user":
            written[-1] = {**written[-1], "content": _both(written[-1]["content"], spoken["content"])}
        else:
            written.append(spoken)
    return written


def _written(message: Message) -> Message:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        open, close = "<tool_response>", "</tool_response>"
        if isinstance(content, list):
            content = [{"type": "text", "text": open}, *content, {"type": "text", "text": close}]
        else:
            content = f"{open}{content}{close}"
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(_written_call(call["function"]) for call in message["tool_calls"])
    bare = {key: value for key, value in message.items() if key != "tool_calls"}
    return bare | {"content": _both(content, calls) if content else calls}


def _written_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {text}}}</tool_call>'


def _both(first: Any, second: Any) -> Any:
    """Join two contents, as text if both are."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts(first), {"type": "text", "text": "\n"}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _part_calls(messages: Messages) -> Iterator[Message]:
    """Give the text beside calls a message of its own. The reasoning stays with the calls, of which templates
    keep it longer."""
    for message in messages:
        content = message.get("content")
        if content and message.get("tool_calls"):
            yield {key: message[key] for key in ("role", "name", "content") if key in message}
            message = {**message, "content": ""}
        yield message


def _name_ids(messages: Messages) -> Iterator[Message]:
    """Give calls the ids that the model itself gives, numbered from the beginning, and results the same."""
    count, named, waiting = 0, dict[str, str](), list[str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [
                f"functions.{call['function']['name']}:{place}" for place, call in enumerate(calls, count)
            ]
            count += len(calls)
            named |= {call["id"]: id for call, id in zip(calls, waiting, strict=True) if "id" in call}
            calls = [{**call, "id": id} for call, id in zip(calls, waiting, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            old = message.get("tool_call_id")
            id = named.get(old, old) if old else waiting.pop(0) if waiting else ""
            message = {**message, "tool_call_id": id}
        yield message


def _split_calls(messages: Messages) -> Iterator[Message]:
    """Give each call a message of its own, with its result behind it."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        results = [*takewhile(lambda each: each.get("role") == "tool", messages[place:])]
        place += len(results)
        for number, call in enumerate(calls):
            yield {**message, "tool_calls": [call]} if number == 0 else {**_BARE, "tool_calls": [call]}
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            own = own if "id" in call else results[:1]
            yield from own
            results = [each for each in results if each not in own]
        yield from results


def _answer_results(messages: Messages, text: str) -> Iterator[Message]:
    before = None
    for message in messages:
        role = message.get("role")
        if before in ("tool", "user") and role == "user":
            yield {"role": "assistant", "content": text}
        yield message
        if role != "system":  # such templates count the others only
            before = role


def _lay_out_one(message: Message, wants: Wants) -> Message:
    content, thought = message.get("content"), message.get(THOUGHT_KEYS[0])
    if wants.thoughts_under == THOUGHT_PARTS and thought:
        laid = {key: it for key, it in message.items() if key != THOUGHT_KEYS[0]}
        said = [{"type": "thinking", "thinking": thought}]
        laid["content"] = [*said, *_parts(content)] if content else said
    else:
        laid = {wants.thoughts_under if key == THOUGHT_KEYS[0] else key: it for key, it in message.items()}
    if calls := message.get("tool_calls"):
        laid["tool_calls"] = [_lay_out_call(call, wants) for call in calls]
        if wants.null_contents:
            laid["content"] = None
    if wants.short_ids and message.get("role") == "tool":
        _shorten(laid, "tool_call_id")
    if wants.splits_contents and isinstance(laid.get("content"), str):
        laid["content"] = _parts(laid["content"])
    return laid


def _lay_out_call(call: Mapping[str, Any], wants: Wants) -> Mapping[str, Any]:
    laid, function = dict(call), call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) and not wants.takes_cut_text:
        found = object_in(arguments)
        arguments = {"arguments": arguments} if found is None else found
    if wants.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    laid["function"] = {**function, "arguments": arguments}
    if wants.short_ids:
        _shorten(laid, "id")
    return laid


def _shorten(item: dict[str, Any], key: str) -> None:
    """Replace an id that is not of Mistral's form; calls and results still match. Legacy ones have none."""
    id = item.get(key, "")
    if isinstance(id, str) and not (len(id) == _SHORT_LENGTH and id.isascii() and id.isalnum()):
        item[key] = hashlib.sha256(id.encode()).hexdigest()[:_SHORT_LENGTH]
