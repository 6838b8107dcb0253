"""Tool dialogues: calls of the right tool with the right arguments, use of results, and plain answers if no
tool fits.

Names, parameters and questions share invented nouns, so that the model must match a question to a new schema
and copy the names from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.pocket.copies import copy_exchange
from recipes.pocket.dialogue import Dialogue, Message, assistant, calls, system, tool_result, turns, user
from recipes.pocket.fillers import Fillers
from recipes.pocket.talk import hard_exchange, talk_exchange

NO_TOOL = "I have no tool for that."

_VERBS = ("get", "get", "find", "check", "fetch", "read", "look_up", "show")
_ADJECTIVES = ("current", "current", "latest", "local", "live", "new", "daily")
_WHERE = ("city", "city", "place", "port", "town", "country", "station", "location", "street", "region")
_ASK_PLACE = (
    "What is the {n} in {v}?", "What is the {n} in {v}?", "What is the {n} in {v}?",
    "What's the {n} in {v}?", "What is the {n} in {v} today?", "Tell me the {n} in {v}.",
    "How is the {n} in {v}?", "What is the {n} of {v}?", "What is the {n} for {v}?",
    "Please check the {n} in {v}.", "{n} in {v}?", "What is the {n} at {v}?",
    "I want to know the {n} in {v}.", "How is the {n} in {v} now?", "What's the {n} like in {v}?",
    "What's the {n} like in {v} today?", "How is the {n} in {v} today?", "What will the {n} be in {v}?",
    "Show me the {n} in {v}.", "Can you tell me the {n} in {v}?", "Could you check the {n} for {v}?",
    "Get me the {n} in {v}.", "I need the {n} of {v}.", "What's the current {n} in {v}?",
)  # fmt: skip
_SUMS = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is {a} + {b}?", "How much is {a} plus {b}?"),
    "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?"),
    "subtract": ("What is {a} minus {b}?", "What is {a} - {b}?", "How much is {a} minus {b}?"),
    "divide": ("What is {a} divided by {b}?", "Divide {a} by {b}.", "What is {a} / {b}?"),
}
_SUM_PARAMETERS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
_ACTS = ("list", "read", "read", "open", "delete", "create", "run", "play", "start", "stop", "close", "copy")
_ACT_ON = ("path", "path", "name", "id", "file", "title", "target", "key")
_ASK_ACT = (
    "{A} the {n} {v}.", "{A} the {n} {v}.", "{A} {n} {v}.", "Please {a} the {n} {v}.",
    "{A} the {n} called {v}.", "Can you {a} the {n} {v}?", "{A} the {n} in {v}.",
    "I want to {a} the {n} {v}.",
)  # fmt: skip
_ENDINGS = ("py", "txt", "md", "json", "csv", "log")
_UNITS = ("degrees", "percent", "metres", "minutes", "euros", "points", "hours")


@dataclass(frozen=True)
class Use:
    """A tool's schema, with one question for it, the matching calls, and their results."""

    subject: str
    """The purpose of the tool. Two tools with one subject could not be told apart."""
    schema: dict[str, Any]
    question: str
    arguments: Sequence[dict[str, Any]]
    """Arguments of one call, or of several that the question asks for."""
    results: Sequence[str]
    answer: str

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def _schema(
    fill: Fillers, name: str, about: str, parameters: dict[str, str], optional: bool = False
) -> dict[str, Any]:
    """Return a tool schema. `optional`: add a parameter that no question uses."""
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in parameters.items()}
    if optional:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    if fill.chance(0.15):
        for key, value in properties.items():
            value["description"] = f"the {key}"
    described: dict[str, Any] = {"type": "object", "properties": properties}
    if optional or fill.chance(0.7):
        described["required"] = list(parameters)
    function: dict[str, Any] = {"name": name}
    if fill.chance(0.5):
        function["description"] = about
    function["parameters"] = described
    return {"type": "function", "function": function}


def _verb(fill: Fillers) -> str:
    """Return a verb, often one unrelated to the question, which can only be copied from the schema."""
    return fill.noun() if fill.chance(0.3) else fill.pick(_VERBS)


def _lookup(fill: Fillers) -> Use:
    """Return `get_weather(city)` and similar, with a noun of one or two words."""
    noun = "weather" if fill.chance(0.1) else fill.noun()
    if fill.chance(0.15):
        noun += " " + fill.noun()
    parameter = fill.pick(_WHERE) if fill.chance(0.6) else fill.noun()
    name = f"{_verb(fill)}_{noun.replace(' ', '_')}"
    if fill.chance(0.12):  # an adjective that is not in the question
        name = name.replace("_", f"_{fill.pick(_ADJECTIVES)}_", 1)
    if fill.chance(0.1):
        name = noun.replace(" ", "_")
    places = [
        fill.place() if fill.chance(0.85) else fill.name() for _ in range(2 if fill.chance(0.12) else 1)
    ]
    about = fill.pick((
        f"Get the {noun} in a {parameter}.", f"The {noun} of a {parameter}", f"Current {noun}",
        f"Get the current {noun} in a given {parameter}",
    ))  # fmt: skip
    findings = [_finding(fill, noun, place) for place in places]
    question = fill.loose(fill.pick(_ASK_PLACE).format(n=noun, v=" and ".join(places)))
    return Use(
        noun,
        _schema(fill, name, about, {parameter: "string"}, optional=fill.chance(0.1)),
        question,
        [{parameter: place} for place in places],
        [result for result, _ in findings],
        " ".join(answer for _, answer in findings),
    )


def _finding(fill: Fillers, noun: str, place: str) -> tuple[str, str]:
    """Return a result, as plain text or JSON, and the answer made from it."""
    if fill.chance(0.3):
        found = {fill.noun(): fill.number(0, 99), fill.noun(): fill.noun()}
        if fill.chance(0.4):
            found.popitem()
        told = ", ".join(f"{key} {value}" for key, value in found.items())
        return json.dumps(found, ensure_ascii=False), f"The {noun} in {place}: {told}."
    result = fill.pick((
        f"{fill.number(0, 99)} {fill.pick(_UNITS)}", fill.noun(),
        f"{fill.noun()}, {fill.number(0, 40)} degrees",
        fill.value(),
    ))  # fmt: skip
    return result, f"The {noun} in {place} is {result}."


def _sum(fill: Fillers) -> Use:
    name = fill.pick(("add", "add", *_SUMS))
    first, second = fill.pick(_SUM_PARAMETERS)
    largest = fill.pick((20, 99, 999, 9999))
    a, b = fill.number(0, largest), fill.number(0, largest)
    kind = fill.pick(("integer", "number"))
    result = str(fill.number(0, 9999))
    schema = _schema(fill, name, f"{name.capitalize()} two numbers.", {first: kind, second: kind})
    question = fill.loose(fill.pick(_SUMS[name]).format(a=a, b=b))
    return Use(name, schema, question, [{first: a, second: b}], [result], f"The result is {result}.")


def _search(fill: Fillers) -> Use:
    where = fill.noun() if fill.chance(0.5) else ""
    name = f"search_{where}" if where else fill.pick(("search", "search", "web_search", "search_web"))
    text = fill.pick((fill.sentence(4).strip(".!?,:;…"), fill.name(), fill.phrase(), fill.place()))
    question = fill.pick(
        (f"Search the {where} for {text}.", f"Search for {text} in the {where}.")
        if where
        else (f"Search for {text}.", f"Search the web for {text}.", f"Please search for {text}.")
    )
    parameter = fill.pick(("query", "query", "text", "q", "term"))
    about = f"Search the {where or 'web'}."
    result = fill.pick((fill.sentence(6), fill.phrase()))
    schema = _schema(fill, name, about, {parameter: "string"})
    return Use(
        f"search {where}",
        schema,
        fill.loose(question),
        [{parameter: text}],
        [result],
        f"I found this: {result}",
    )


def _send(fill: Fillers) -> Use:
    """Return a tool with two parameters of different kinds; the noun is in the name."""
    noun, person = fill.noun(), fill.name()
    if fill.chance(0.5):
        text = fill.sentence(5)
        name, keys = f"send_{noun}", fill.pick((("to", "text"), ("recipient", "message"), ("name", "body")))
        question = fill.pick((f"Send a {noun} to {person}: {text}", f"Send {person} a {noun}: {text}"))
        arguments: dict[str, Any] = dict(zip(keys, (person, text), strict=True))
    else:
        count = fill.number(1, 30)
        name, keys = f"book_{noun}", fill.pick((("name", "count"), ("guest", "people"), ("name", "number")))
        question = fill.pick(
            (f"Book a {noun} for {person}, {count} people.", f"Book {count} {noun} for {person}.")
        )
        arguments = dict(zip(keys, (person, count), strict=True))
    kinds = {key: "integer" if isinstance(value, int) else "string" for key, value in arguments.items()}
    schema = _schema(fill, name, f"{name.split('_')[0].capitalize()} a {noun}.", kinds)
    return Use(name, schema, question, [arguments], ["ok"], "Done.")


def _set(fill: Fillers) -> Use:
    noun, value = fill.noun(), fill.value()
    parameter = fill.pick(("value", "to", "state", noun))
    question = fill.pick((f"Set the {noun} to {value}.", f"Please set the {noun} to {value}."))
    schema = _schema(fill, f"set_{noun}", f"Set the {noun}.", {parameter: "string"})
    return Use(f"set {noun}", schema, fill.loose(question), [{parameter: value}], ["ok"], "Done.")


def _act(fill: Fillers) -> Use:
    """Return `read_file(path)` and similar. The verb is in the question, and may be what distinguishes two
    tools."""
    noun = fill.pick(("file", "file", "folder", "page", "note")) if fill.chance(0.3) else fill.noun()
    verb, parameter = fill.pick(_ACTS), fill.pick(_ACT_ON)
    target = fill.pick((fill.code(), fill.name(), fill.noun(), f"{fill.noun()}/{fill.noun()}"))
    if fill.chance(0.5):
        target = f"{target}.{fill.pick(_ENDINGS)}"
    question = fill.pick(_ASK_ACT).format(A=verb.capitalize(), a=verb, n=noun, v=target)
    schema = _schema(fill, f"{verb}_{noun}", f"{verb.capitalize()} a {noun}.", {parameter: "string"})
    result = fill.value()
    return Use(
        f"{verb} {noun}",
        schema,
        fill.loose(question),
        [{parameter: target}],
        [result],
        f"The result is {result}.",
    )


def _plain(fill: Fillers) -> Use:
    """Return a tool without parameters."""
    noun = fill.noun()
    result = fill.value()
    question = fill.pick((f"What is the {noun}?", f"Tell me the {noun}.", f"What is the {noun} now?"))
    schema = _schema(fill, f"{_verb(fill)}_{noun}", f"Get the {noun}.", {})
    return Use(noun, schema, fill.loose(question), [{}], [result], f"The {noun} is {result}.")


_KINDS: tuple[Callable[[Fillers], Use], ...] = (
    _lookup, _lookup, _lookup, _lookup, _lookup, _act, _act, _sum, _search, _send, _set, _plain,
)  # fmt: skip


def tools(
    fill: Fillers, counts: Sequence[int] = (1, 1, 2, 2, 3, 4), questions: Sequence[int] = (1, 2, 3)
) -> Dialogue:
    """Return a dialogue with some of `questions` over some of `counts` tools; the last turn is a call or an
    answer from a result."""
    uses: dict[str, Use] = {}
    for _ in range(fill.pick(counts)):
        use = fill.pick(_KINDS)(fill)
        uses.setdefault(use.subject, use)
    offered = {use.name: use for use in uses.values()}
    messages: list[Message] = [system("You are a helpful assistant.")] if fill.chance(0.2) else []
    thought = "No tool is needed."
    asked = fill.draw.sample(list(offered.values()), min(len(offered), fill.pick(questions)))
    for use in asked:
        if fill.chance(0.3):
            messages += _without_tool(fill, list(offered))
        messages += [user(use.question), calls(use.name, *use.arguments)]
        thought = f"I call {use.name}."
        if use is not asked[-1] or fill.chance(0.6):
            messages += [*map(tool_result, use.results), assistant(use.answer)]
            thought = "The tool has answered."
    if messages[-1].get("content") and fill.chance(0.3):
        messages += _without_tool(fill, list(offered))
        thought = "No tool fits."
    schemas = [use.schema for use in offered.values()]
    return Dialogue("tools", messages, tools=schemas, thought=thought)


def _without_tool(fill: Fillers, offered: Sequence[str]) -> list[Message]:
    """Return talk that needs no tool, a request beyond the model's abilities, or a question that none of
    `offered` fits."""
    if fill.chance(0.45):
        talk = fill.pick((talk_exchange, talk_exchange, hard_exchange))
        return turns(talk(fill) if fill.chance(0.7) else copy_exchange(fill, longest=5))
    while True:
        use = _lookup(fill)
        if not any(use.subject.replace(" ", "_") in name for name in offered):
            return [user(use.question), assistant(NO_TOOL)]
