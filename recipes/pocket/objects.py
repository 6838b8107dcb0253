"""JSON dialogues: sentences converted to an object of a given shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from recipes.pocket.dialogue import Dialogue, assistant, system, user
from recipes.pocket.fillers import COLOURS, Fillers

_ASK_KEYS = (
    "Turn this into JSON with the keys {k}: {t}", "Extract {k} as JSON: {t}", "{t} Give me {k} as JSON.",
    "{t}\nAnswer with a JSON object with the keys {k}.", "JSON with {k}: {t}",
    "Write a JSON object with {k} for this: {t}", "{t} Answer as JSON with {k}.", "{t} Answer in JSON: {k}.",
    "Give me {k} as JSON: {t}",
)  # fmt: skip
_ASK_SHAPE = (
    "Answer as JSON like {s}: {t}", "{t} Answer with JSON of this shape: {s}",
    "Turn this into JSON: {t}\n{s}", "Turn \"{t}\" into a JSON object of this shape: {s}",
    "{t}\nAnswer in JSON that matches this schema: {s}", "Fill in this object: {s}\n{t}",
)  # fmt: skip

Values = dict[str, str | int]


def _person(fill: Fillers) -> tuple[str, Values]:
    name, age, city = fill.name(), fill.number(1, 99), fill.place()
    told = fill.pick((
        f"{name} is {age} and lives in {city}.", f"{name} is {age} and lives in {city}.",
        f"{name} is {age} years old and lives in {city}.", f"{name} lives in {city} and is {age}.",
        f"My friend {name} from {city} is {age}.", f"{name}, {age}, {city}.",
    ))  # fmt: skip
    return told, {"name": name, "age": age, "city": city}


def _worker(fill: Fillers) -> tuple[str, Values]:
    name, job, city = fill.name(), fill.noun(), fill.place()
    told = fill.pick((
        f"{name} works as a {job} in {city}.", f"{name} is a {job} and lives in {city}.",
        f"{name}, a {job} from {city}.",
    ))  # fmt: skip
    return told, {"name": name, "job": job, "city": city}


def _item(fill: Fillers) -> tuple[str, Values]:
    item, price, colour = fill.noun(), fill.number(1, 999), fill.pick(COLOURS)
    told = fill.pick((
        f"The {item} costs {price} and is {colour}.", f"The {colour} {item} costs {price}.",
        f"A {colour} {item} for {price}.",
    ))  # fmt: skip
    return told, {"item": item, "price": price, "colour": colour}


def _free(fill: Fillers) -> tuple[str, Values]:
    values: Values = {
        fill.noun(): fill.number(0, 999) if fill.chance(0.4) else fill.value()
        for _ in range(fill.number(1, 3))
    }
    parts = [f"the {key} is {value}" for key, value in values.items()]
    told = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] + "."
    return told[0].upper() + told[1:], values


_SOURCES: tuple[Callable[[Fillers], tuple[str, Values]], ...] = (
    _person,
    _person,
    _person,
    _worker,
    _item,
    _free,
)


def objects(fill: Fillers) -> Dialogue:
    """Return a dialogue about one to three objects, requested by keys, by an example of the shape or by a
    schema."""
    messages = []
    count = fill.number(1, 3)
    source = fill.pick(_SOURCES)
    in_system = source is not _free and fill.chance(0.2)
    wanted: list[str] = []
    for turn in range(count):
        told, values = source(fill)
        told = fill.loose(told)
        if turn == 0 or not in_system:
            wanted = _choose(fill, values)
        if in_system:
            if turn == 0:
                messages.append(system(_ask(fill, "", values, wanted).strip(' "\n')))
            messages.append(user(told))
        else:
            messages.append(user(_ask(fill, told, values, wanted)))
        answer = json.dumps({key: values[key] for key in wanted}, ensure_ascii=False)
        messages.append(assistant(answer))
    return Dialogue("json", messages, thought="I write the object.")


def _choose(fill: Fillers, values: Values) -> list[str]:
    """Return mostly all keys in order, sometimes fewer or in another order."""
    keys = list(values)
    if fill.chance(0.4):
        fill.draw.shuffle(keys)
    if fill.chance(0.25) and len(keys) > 1:
        keys.pop()
    return keys


def _ask(fill: Fillers, told: str, values: Values, wanted: list[str]) -> str:
    if fill.chance(0.5):
        keys = ", ".join(wanted)
        if fill.chance(0.6) and len(wanted) > 1:
            keys = ", ".join(wanted[:-1]) + " and " + wanted[-1]
        return fill.pick(_ASK_KEYS).format(k=keys, t=told)
    return fill.pick(_ASK_SHAPE).replace("{s}", _shape(fill, values, wanted)).replace("{t}", told)


def _shape(fill: Fillers, values: Values, wanted: list[str]) -> str:
    kinds = {key: "integer" if isinstance(values[key], int) else "string" for key in wanted}
    if fill.chance(0.4):
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if fill.chance(0.7):
            schema["required"] = wanted
        return json.dumps(schema)
    if fill.chance(0.5):
        return json.dumps(kinds)
    return "{" + ", ".join(f'"{key}": …' for key in wanted) + "}"
