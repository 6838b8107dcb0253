"""Recall dialogues: facts from the user or the system prompt, asked for some turns later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.pocket.copies import copy_exchange
from recipes.pocket.dialogue import Dialogue, Exchange, Message, assistant, system, turns, user
from recipes.pocket.fillers import Fillers
from recipes.pocket.talk import talk_exchange


@dataclass(frozen=True)
class Fact:
    """One fact about the user or the world, with its phrasings."""

    told: str
    noted: str
    by_system: str
    question: str
    answer: str
    topic: str


_TELL_NAME = (
    "My name is {v}.", "My name is {v}.", "My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.",
    "Hello, my name is {v}.", "Hi! I am called {v}.", "People call me {v}.", "my name is {v}",
)  # fmt: skip
_ASK_NAME = (
    "What is my name?", "What is my name?", "What's my name?", "Who am I?", "Do you remember my name?",
    "Tell me my name.", "Do you know my name?", "And what is my name?", "what is my name",
)  # fmt: skip
_SYSTEM_NAME = ("The user's name is {v}.", "The user is called {v}.", "You are talking to {v}.")
_TELL_PLACE = (
    "I live in {v}.", "I live in {v}.", "My home is in {v}.", "I live in {v} now.", "I moved to {v}.",
    "My city is {v}.",
)  # fmt: skip
_ASK_PLACE = (
    "Where do I live?", "Where do I live?", "Which city do I live in?", "What city do I live in?",
    "Do you remember where I live?", "Tell me where I live.", "Where is my home?", "What is my city?",
)  # fmt: skip
_SYSTEM_PLACE = ("The user lives in {v}.", "The user lives in {v}.", "The user's home is {v}.")
_ASK_AGE = ("How old am I?", "What is my age?", "Do you remember my age?", "Tell me how old I am.")
_TELL_OWN = ("My {n} is {v}.", "My {n} is called {v}.", "Remember that my {n} is {v}.", "My {n}: {v}.")
_ASK_OWN = (
    "What is my {n}?", "What's my {n}?", "Tell me my {n}.", "Do you remember my {n}?",
    "What is my {n} called?",
)  # fmt: skip
_SYSTEM_OWN = ("The user's {n} is {v}.", "The {n} of the user is {v}.")
_TELL_WORLD = ("The {n} is {v}.", "Remember: the {n} is {v}.", "Please remember that the {n} is {v}.")
_ASK_WORLD = ("What is the {n}?", "What's the {n}?", "Tell me the {n}.", "Do you remember the {n}?")
_SYSTEM_WORLD = ("The {n} is {v}.", "The {n} is {v}.", "Know that the {n} is {v}.")
_MANNERS = (
    "You are a helpful assistant.", "Be brief.", "Answer in one sentence.", "You are Roundhouse.",
    "You are a helpful assistant. Answer briefly.",
)  # fmt: skip


def _name(fill: Fillers) -> Fact:
    value = fill.name()
    return Fact(
        told=fill.pick(_TELL_NAME).format(v=value),
        noted=f"Nice to meet you, {value}.",
        by_system=fill.pick(_SYSTEM_NAME).format(v=value),
        question=fill.pick(_ASK_NAME),
        answer=f"Your name is {value}.",
        topic="name",
    )


def _place(fill: Fillers) -> Fact:
    value = fill.place()
    return Fact(
        told=fill.pick(_TELL_PLACE).format(v=value),
        noted=f"You live in {value}. I will remember that.",
        by_system=fill.pick(_SYSTEM_PLACE).format(v=value),
        question=fill.pick(_ASK_PLACE),
        answer=f"You live in {value}.",
        topic="city",
    )


def _age(fill: Fillers) -> Fact:
    value = fill.number(1, 120)
    return Fact(
        told=fill.pick((f"I am {value} years old.", f"I'm {value} years old.", f"My age is {value}.")),
        noted=f"You are {value} years old. I will remember that.",
        by_system=f"The user is {value} years old.",
        question=fill.pick(_ASK_AGE),
        answer=f"You are {value} years old.",
        topic="age",
    )


def _own(fill: Fillers) -> Fact:
    noun, value = fill.noun(), fill.value()
    if fill.chance(0.3):
        noun = "favourite " + noun
    return Fact(
        told=fill.pick(_TELL_OWN).format(n=noun, v=value),
        noted=f"Your {noun} is {value}. I will remember that.",
        by_system=fill.pick(_SYSTEM_OWN).format(n=noun, v=value),
        question=fill.pick(_ASK_OWN).format(n=noun),
        answer=f"Your {noun} is {value}.",
        topic=noun,
    )


def _world(fill: Fillers) -> Fact:
    noun, value = fill.noun(), fill.value()
    return Fact(
        told=fill.pick(_TELL_WORLD).format(n=noun, v=value),
        noted=f"The {noun} is {value}. I will remember that.",
        by_system=fill.pick(_SYSTEM_WORLD).format(n=noun, v=value),
        question=fill.pick(_ASK_WORLD).format(n=noun),
        answer=f"The {noun} is {value}.",
        topic=noun,
    )


_KINDS: tuple[Callable[[Fillers], Fact], ...] = (_name, _name, _place, _place, _age, _own, _own, _world)


def _facts(fill: Fillers, count: int) -> list[Fact]:
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = fill.pick(_KINDS)(fill)
        facts.setdefault(fact.topic, fact)
    return list(facts.values())


def _head(fill: Fillers, facts: list[Fact]) -> list[Message]:
    """Return a system message with the facts, or none if there are none."""
    known = [fact.by_system for fact in facts]
    if fill.chance(0.4):
        known.insert(0, fill.pick(_MANNERS))
    joint = fill.pick((" ", " ", "\n"))
    return [system(joint.join(known))] if known else []


def recall(fill: Fillers) -> Dialogue:
    """Return a dialogue with facts from the system and the user, other talk between, then questions about
    some of the facts."""
    facts = _facts(fill, fill.number(1, 4))
    split = fill.number(0, len(facts)) if fill.chance(0.6) else 0
    messages = _head(fill, facts[:split])
    for fact in facts[split:]:
        messages += [user(fill.loose(fact.told)), assistant(fact.noted)]
        if fill.chance(0.4):
            messages += turns(_other(fill))
    asked = [fill.pick(facts) for _ in range(fill.number(1, 3))]
    for fact in asked:
        if fill.chance(0.1):
            messages += turns(_other(fill))
        messages += turns(Exchange(fill.loose(fact.question), fact.answer))
    thought = f"The user asks for the {asked[-1].topic}. I know it."
    if fill.chance(0.25):
        unknown = _unknown(fill, {fact.topic for fact in facts})
        messages += turns(unknown)
        thought = unknown.thought
    return Dialogue("recall", messages, thought=thought)


def _other(fill: Fillers) -> Exchange:
    return talk_exchange(fill) if fill.chance(0.6) else copy_exchange(fill, longest=6)


def _unknown(fill: Fillers, topics: set[str]) -> Exchange:
    """Return a question about a fact that was not stated."""
    while True:
        fact = fill.pick(_KINDS)(fill)
        if fact.topic not in topics:
            return Exchange(fact.question, "You have not told me that.", "Nobody has told me that.")
