"""Copying dialogues: texts repeated verbatim in several scripts, words spelled, numbers counted."""

from __future__ import annotations

from recipes.pocket.dialogue import Dialogue, Exchange, turns
from recipes.pocket.fillers import SCRIPTS, Fillers

_ASK_COPY = (
    "Repeat: {t}", "Repeat: {t}", "Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Echo: {t}",
    "Copy: {t}", "Please repeat: {t}", "Repeat this: {t}", "Repeat the following text: {t}",
    "Write exactly this: {t}", "Repeat this sentence: {t}", "Repeat\n{t}", "Say {t}", "repeat: {t}",
)  # fmt: skip
_ASK_SPELL = ("Spell {w}.", "Spell: {w}", "Spell the word {w}.", "How do you spell {w}?")
_ASK_COUNT = (
    "Count from {a} to {b}.", "Count from {a} to {b}.", "Count from {a} to {b}",
    "Please count from {a} to {b}.", "Count up from {a} to {b}.", "List the numbers from {a} to {b}.",
    "Can you count from {a} to {b}?",
)  # fmt: skip
_ASK_COUNT_TO = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?", "Please count to {b}.")
_WEIGHTS = {
    "english": 5,
    "chinese": 4,
    "japanese": 4,
    "korean": 4,
    "emoji": 2,
    "accents": 3,
    "cyrillic": 3,
    "greek": 2,
}
_KINDS = tuple(kind for kind in SCRIPTS for _ in range(_WEIGHTS.get(kind, 1)))


def copy_exchange(fill: Fillers, longest: int = 12, script: str | None = None) -> Exchange:
    """Return a copying exchange. `longest`: in words of English, in characters of other scripts."""
    text = fill.script(script or fill.pick(_KINDS), longest)
    if script is None and fill.chance(0.1):
        text = f"{text} {fill.script(fill.pick(_KINDS), longest // 2)}"
    return Exchange(fill.pick(_ASK_COPY).format(t=text), text, "I repeat the text as it is.")


def spell_exchange(fill: Fillers) -> Exchange:
    word = fill.pick((fill.name, fill.noun, fill.letters))()
    return Exchange(fill.pick(_ASK_SPELL).format(w=word), "-".join(word), "I spell it letter by letter.")


def count_exchange(fill: Fillers, longest: int = 30) -> Exchange:
    """Return an exchange that counts upwards. Pairs of first and last number are split between training and
    evaluation."""
    while True:
        # Mostly short ones: stopping in time is harder than continuing.
        length = fill.number(1, fill.pick((6, 12, longest, longest)))
        first = fill.pick((1, 1, fill.number(0, 30), fill.number(0, 999)))
        last = first + length - 1
        # 1 to 200 is a common test of length; without this, chance decided whether it is held out.
        if fill.ours(f"{first} {last}") and (first, last) != (1, 200):
            break
    asks = _ASK_COUNT_TO if first == 1 and fill.chance(0.3) else _ASK_COUNT
    question = fill.loose(fill.pick(asks).format(a=first, b=last))
    answer = " ".join(map(str, range(first, last + 1)))
    return Exchange(question, answer, f"I start at {first} and stop at {last}.")


def copies(fill: Fillers) -> Dialogue:
    exchanges = [copy_exchange(fill, fill.pick((4, 8, 12, 20))) for _ in range(fill.number(1, 3))]
    return _dialogue("copy", exchanges)


def long_copy(fill: Fillers) -> Dialogue:
    return _dialogue("copy", [copy_exchange(fill, fill.pick((30, 45, 60)))])


def spelling(fill: Fillers) -> Dialogue:
    return _dialogue("spell", [spell_exchange(fill) for _ in range(fill.number(2, 4))])


def counting(fill: Fillers) -> Dialogue:
    return _dialogue("count", [count_exchange(fill) for _ in range(fill.number(1, 3))])


def long_counting(fill: Fillers) -> Dialogue:
    return _dialogue("count", [count_exchange(fill, longest=240)])


def _dialogue(family: str, exchanges: list[Exchange]) -> Dialogue:
    messages = [message for exchange in exchanges for message in turns(exchange)]
    return Dialogue(family, messages, thought=exchanges[-1].thought)
