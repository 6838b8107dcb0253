"""Fillers for the blanks of phrasings: names, places, words, sentences in several scripts.

Held-out fillers never occur in training: real names and cities have separate lists, and every invented string
is assigned to one side by its checksum. Most training fillers are invented, so that a value can only be
copied, not memorized.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from tests.models.corpus import make_corpus

_T = TypeVar("_T")


def words(text: str) -> list[str]:
    return text.split()


NAMES = words("""
Anna Ben Carla David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Noah Olga Paul Rosa Simon Tina
Ulrich Vera Walter Yara Zoe Amir Bao Chen Divya Emeka Farah Goro Hana Ivan Jamal Kofi Lin Mei Nadia Omar
Priya Rui Sven Tariq Uma Viktor Wanda Xenia Yusuf Zita Mary John Peter Susan Tom Kate Jack Lucy Bob Alice
""")
HELD_OUT_NAMES = words("""
Ada Grace Linus Xochitl Björn Zoltan Quentin Siobhan Łukasz Noémie Ximena Wojciech Aoife Dmitri Yevgenia
Ingrid Thorvald Nguyen Kwame Zsófia Jürgen Ayşe Quirin Bartholomew Eloïse Gizem Rafał Þóra Oluwaseun
Vikram
""")
PLACES = words("""
London Berlin Madrid Rome Vienna Oslo Dublin Athens Warsaw Prague Boston Chicago Dallas Denver Seattle
Toronto Sydney Cairo Lagos Nairobi Delhi Mumbai Tokyo Osaka Seoul Beijing Shanghai Hanoi Bangkok Manila
Hamburg Munich Milan Naples Lyon Nice Bern Geneva Bergen Malmö Turku Porto Seville Bilbao Cork Leeds Bath
""")
HELD_OUT_PLACES = words("""
Paris Brest Quito Zürich Łódź Reykjavik Xalapa Kyoto Bogotá Wrocław Gdańsk Vaduz Zagreb Tbilisi Aarhus
Ouagadougou Yokohama Düsseldorf Marrakesh Phoenix Jyväskylä Vilnius Qom Córdoba Tromsø Busan Znojmo Ghent
""")
NOUNS = words("""
weather temperature time price news traffic humidity distance population stock forecast wind snow height
schedule status balance capital menu score rain speed level colour song book car dog cat bird tree street
number code password key word team game sport food drink fruit city country flower season month teacher
doctor school hotel train bus ticket room table lamp door window garden kitchen letter
""")
HELD_OUT_NOUNS = words("""
tide pollen visibility ferry sunrise rent voltage salinity queue altitude dialect vintage harvest
pressure smog toll mascot anthem emblem zipcode quota wavelength inflation depth fjord
""")
_HELD_OUT = frozenset(HELD_OUT_NAMES + HELD_OUT_PLACES + HELD_OUT_NOUNS)

COLOURS = words("red green blue yellow orange purple pink brown black white grey")

_CONSONANTS = words("b c d f g h j k l m n p r s t v w z x q ch sh th br dr kr st tr zh sk ł ñ ş ž ç š đ ß")
_VOWELS = words("a e i o u y ai ei ou ia ö ü é á ø å ı ë ô")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_EMOJI_BASES = words("👍 👋 👏 🙌 🤝 🙏 💪 👩 👨 🧑 👶 👧 👦")
_EMOJI_BLOCKS = ((0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F90D, 0x1F9FF), (0x2600, 0x27BF))
_EMOJI_SKINS = ("", "", "\U0001f3fb", "\U0001f3fc", "\U0001f3fd", "\U0001f3fe", "\U0001f3ff")
_EMOJI_JOBS = words("💻 🔬 🚀 🎨 🍳 🏫 🔧 🚒")
_COMBINING = "\u0301\u0300\u0302\u0303\u0308\u030a\u030c\u0323\u0331"
_KANA = "".join(chr(c) for c in (*range(0x3042, 0x3094), *range(0x30A2, 0x30F5)))
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюя"
_GREEK = "αβγδεζηθικλμνξοπρστυφχψωάέήίόύώ"


@cache
def _dictionary() -> tuple[str, ...]:
    found = {word for piece in make_corpus(3000) for word in piece.split()}
    return tuple(sorted(word for word in found if word.isalpha() and word.islower()))


@cache
def _phrases(first: str, last: str) -> tuple[str, ...]:
    """Return the corpus's phrases in a script, so that the tokenizer's longer tokens are used."""
    return tuple(piece.strip() for piece in make_corpus(3000) if any(first <= c <= last for c in piece))


@cache
def _table(codec: str, first: int, last: int) -> str:
    """Return the characters of a national standard's common rows."""
    pairs = (bytes((row, cell)) for row in range(first, last) for cell in range(0xA1, 0xFF))
    return "".join(pair.decode(codec, errors="ignore") for pair in pairs)


_CHINESE = _table("gb2312", 0xB0, 0xD8)
_JAPANESE = _KANA * 6 + _table("euc_jp", 0xB0, 0xD0)
_KOREAN = _table("euc_kr", 0xB0, 0xC9)


class Fillers:
    """Draws fillers of one side: for training, or (`held_out`) for evaluation.

    `pieces`: the tokenizer's tokens; texts made of them include tokens that are rare elsewhere.
    """

    def __init__(self, draw: random.Random, held_out: bool = False, pieces: Sequence[str] = ()) -> None:
        self.draw = draw
        self.held_out = held_out
        self.pieces = pieces
        self._letters, self._foreign = _of_letters(tuple(pieces)), _not_english(tuple(pieces))

    def pick(self, options: Sequence[_T]) -> _T:
        return options[int(self.draw.random() * len(options))]

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def number(self, first: int, last: int) -> int:
        """Return a number from `first` to `last`, both included."""
        return first + int(self.draw.random() * (last - first + 1))

    def ours(self, text: str) -> bool:
        """Return whether an invented text belongs to this side: one in eight is held out."""
        return (zlib.crc32(text.encode()) % 8 == 0) == self.held_out

    def loose(self, text: str) -> str:
        """Return the text, sometimes without its final punctuation, as people write."""
        return text.rstrip(".?!") if self.chance(0.2) else text

    def name(self) -> str:
        if self.chance(0.5 if self.held_out else 0.25):
            return self.pick(HELD_OUT_NAMES if self.held_out else NAMES)
        return self._invented(self._capital)

    def place(self) -> str:
        if self.chance(0.5 if self.held_out else 0.25):
            return self.pick(HELD_OUT_PLACES if self.held_out else PLACES)
        joint = self.pick(("", "", "", "", "New ", "San ", "Port ", "Bad ", "El "))
        return joint + self._invented(self._capital)

    def noun(self) -> str:
        """Return a lower-case word."""
        if self.chance(0.5 if self.held_out else 0.3):
            return self.pick(HELD_OUT_NOUNS if self.held_out else NOUNS)
        if self.chance(0.4) and not self.held_out:
            return self.pick(_dictionary())
        return self._invented(self._syllables)

    def letters(self) -> str:
        """Return a word of one or two of the tokenizer's tokens."""
        if not self._letters:
            return self.noun()
        return self._invented(lambda: "".join(self.pick(self._letters) for _ in range(self.number(1, 2))))

    def value(self) -> str:
        """Return a value to remember: a name, a word, a number or a code."""
        kinds: tuple[Callable[[], str], ...] = (self.name, self.noun, self.code, self.phrase)
        return self.pick(kinds)()

    def code(self) -> str:
        return self._invented(self._code)

    def phrase(self) -> str:
        return f"{self.noun()} {self.noun()}"

    def sentence(self, longest: int = 10) -> str:
        """Return English-looking words, some invented, with capitals, numbers and punctuation."""
        return self._invented(lambda: self._sentence(longest))

    def prose(self, longest: int = 10) -> str:
        """Return lower-case words, most of them real."""
        chosen = [self.pick(_dictionary()) if self.chance(0.8) else self.noun() for _ in range(longest)]
        return " ".join(chosen[: self.number(1, longest)])

    def script(self, kind: str, longest: int = 12) -> str:
        """Return a text in the script `kind`, one of `SCRIPTS`."""
        makers: dict[str, Callable[[int], str]] = {
            "english": self._sentence,
            "chinese": lambda n: self._run(_CHINESE, n, "，。！？"),
            "japanese": lambda n: self._run(_JAPANESE if self.chance(0.5) else _KANA, n, "、。！"),
            "korean": lambda n: self._run(_KOREAN, n, " "),
            "emoji": self._emoji,
            "accents": self._accents,
            "cyrillic": lambda n: self._run(_CYRILLIC, n * 2, " "),
            "greek": lambda n: self._run(_GREEK, n * 2, " "),
        }
        if self.pieces and self.chance(0.55):
            return self._invented(lambda: self._joined(longest))
        return self._invented(lambda: makers[kind](longest))

    def _invented(self, make: Callable[[], str]) -> str:
        while True:
            text = make()
            if self.ours(text) and text not in _HELD_OUT:
                return text

    def _syllables(self) -> str:
        if self.chance(0.35):
            # Parts of real words, which include the tokenizer's longer tokens.
            return "".join(self._bit() for _ in range(self.number(1, 3)))
        if self.chance(0.25):
            return "".join(self.pick(_LETTERS) for _ in range(self.number(3, 8)))
        plain = self.chance(0.7)
        consonants, vowels = (_CONSONANTS[:28], _VOWELS[:10]) if plain else (_CONSONANTS, _VOWELS)
        text = "".join(self.pick(consonants) + self.pick(vowels) for _ in range(self.number(1, 3)))
        return text + (self.pick(consonants) if self.chance(0.5) else "")

    def _bit(self) -> str:
        if self._letters and self.chance(0.6):
            return self.pick(self._letters)
        word = self.pick(_dictionary())
        start = self.number(0, max(0, len(word) - 3))
        return word[start : start + self.number(2, 6)]

    def _capital(self) -> str:
        text = self._syllables()
        text = text[0].upper() + text[1:]
        return text.upper() if self.chance(0.05) else text

    def _code(self) -> str:
        if self.chance(0.5):
            return str(self.number(0, 10 ** self.number(1, 5)))
        letters = "".join(self.pick(_LETTERS).upper() for _ in range(self.number(1, 3)))
        return f"{letters}{self.pick(('-', '', '_', '/'))}{self.number(1, 9999)}"

    def _word(self) -> str:
        draw = self.draw.random()
        if draw < 0.45:
            return self.pick(_dictionary())
        if draw < 0.85:
            return self._syllables()
        return self._capital() if draw < 0.95 else self._code()

    def _sentence(self, longest: int) -> str:
        chosen = [self._word() for _ in range(self.number(1, longest))]
        if self.chance(0.7):
            chosen[0] = chosen[0][0].upper() + chosen[0][1:]
        if self.chance(0.2):
            spot = self.number(0, len(chosen) - 1)
            chosen[spot] += self.pick((",", ":", ";", "'s", " -", "…"))
        return " ".join(chosen) + self.pick(("", ".", ".", "!", "?"))

    def _joined(self, longest: int) -> str:
        """Return random tokens, some of them after a space."""
        # Tokens that are not ASCII are rare in all other dialogues.
        chosen = [
            self.pick(self._foreign if self.chance(0.7) else self.pieces)
            for _ in range(self.number(1, longest))
        ]
        return "".join(self.pick(("", "", " ")) + piece for piece in chosen).strip()

    def _run(self, alphabet: str, longest: int, marks: str) -> str:
        """Return random letters, or letters with pieces of the corpus among them."""
        text = "".join(self.pick(alphabet) for _ in range(self.number(2, longest)))
        if self.chance(0.5):
            phrase = self.pick(_phrases(min(alphabet), max(alphabet)))
            start = self.number(0, max(0, len(phrase) - 2))
            piece = phrase[start : start + self.number(1, longest)].strip() or phrase
            text = piece if self.chance(0.3) else piece + text[: self.number(1, 4)]
        if len(text) > 4 and self.chance(0.6):
            spot = self.number(2, len(text) - 2)
            text = text[:spot] + self.pick(marks) + text[spot:]
        return text

    def _emoji(self, longest: int) -> str:
        return "".join(self._one_emoji() for _ in range(self.number(1, max(1, longest // 3))))

    def _one_emoji(self) -> str:
        draw = self.draw.random()
        if draw < 0.45:
            return chr(self.number(*self.pick(_EMOJI_BLOCKS)))
        if draw < 0.75:
            return self.pick(_EMOJI_BASES) + self.pick(_EMOJI_SKINS)
        if draw < 0.9:
            person = self.pick("👩👨🧑") + self.pick(_EMOJI_SKINS)
            return f"{person}\u200d{self.pick(_EMOJI_JOBS)}"
        flag = "".join(chr(0x1F1E6 + self.number(0, 25)) for _ in range(2))
        return self.pick((flag, "❤\ufe0f", "☀\ufe0f", "✈\ufe0f", " "))

    def _accents(self, longest: int) -> str:
        accented = []
        for _ in range(self.number(1, max(1, longest // 3))):
            word = self._syllables()
            spot = self.number(1, len(word))
            accented.append(word[:spot] + self.pick(_COMBINING) + word[spot:])
        return " ".join(accented)


SCRIPTS = ("english", "chinese", "japanese", "korean", "emoji", "accents", "cyrillic", "greek")


@cache
def _not_english(pieces: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(piece for piece in pieces if not piece.isascii()) or pieces


@cache
def _of_letters(pieces: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pieces of two or more Latin letters."""
    return tuple(piece for piece in pieces if len(piece) > 1 and piece.isascii() and piece.isalpha())
