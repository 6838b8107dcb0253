"""Literals in the forms that models write, against Python's own parsers."""

from __future__ import annotations

import json
import re
from math import isinf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.output.calls.written import nested, texts
from worker.output.calls.literals import (
    ATOM_CHARACTERS_MAX,
    DEPTH_MAX,
    FUNCTION_GEMMA,
    GEMMA,
    JSON,
    PYTHON,
    transcode,
)

damage = st.text("{}[]():,\"'\\ \n\t-+.0123456789eEutrufalsn", max_size=12)


def by_json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    def number(text: str) -> float | str:
        return text if isinf(float(text)) else float(text)

    value = json.loads(text, parse_constant=refuse, parse_float=number)
    return json.loads(re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False)))


@settings(max_examples=50)
@given(nested, st.sampled_from([None, 1]), st.booleans())
def test_json_goes_through_as_it_was_written(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert transcode(f" {text}\n", JSON) == text


@given(nested, damage, st.data())
def test_json_is_what_python_takes_for_json(value: Any, damage: str, data: st.DataObject) -> None:
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text)))
    for damaged in (text[:place] + damage + text[place + len(damage) :], damage):
        try:
            expected = by_json(damaged)
        except ValueError:
            assert transcode(damaged, JSON) is None
        else:
            said = transcode(damaged, JSON)
            assert said is not None
            assert json.loads(said) == expected


@settings(max_examples=50)
@given(nested)
def test_literals_of_python_become_json(value: Any) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        said = transcode(text, PYTHON)
        assert said is not None
        assert json.loads(said) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1, 'a')", [1, "a"]), ("('a')", "a"), ("('a',)", ["a"]), ("()", []), ("'\\d\\/'", "\\d/"),
        ("{'a': None, 1: True,}", {"a": None, "1": True}), ("'it\\'s \\x41\\101\\u00e9'", "it's AAé"),
        ("'''a 'b'\n\"c\"'''", "a 'b'\n\"c\""), ('"two\nlines"', "two\nlines"), ("'a\\\nb'", "ab"),
        ("[1_000, 0x1f, .5, 5., +3, -0b11]", [1000, 31, 0.5, 5.0, 3, -3]), ("'\\ud83d\\ude00'", "😀"),
        ("'\\n\\q\\0\\1234'", "\n\\q\0S4"), ("'\\ud83d-\\U0000d83d'", "\ufffd-\ufffd"),
        ("'\\ud83d\\ud83d\\ude00\\ude00'", "\ufffd😀\ufffd"), ("[1e999]", ["1e999"]),
        ("'say \"hi\"'", 'say "hi"'),
    ],
)  # fmt: skip
def test_python_only_literal_becomes_json(text: str, value: Any) -> None:
    said = transcode(text, PYTHON)
    assert said is not None
    assert json.loads(said) == value


@pytest.mark.parametrize(
    "text",
    [
        "007", "nan", "inf", "1e999999x", "{1, 2}", "b'a'", "1 + 1", "f(x)", "'a' 'b'", "'\\x4'", "[1", "'a",
        "'\\", "'\\U00110000'", "{: 1}",
    ],
)  # fmt: skip
def test_invalid_literal_yields_none(text: str) -> None:
    assert transcode(text, PYTHON) is None


@given(texts.filter(lambda text: '<|"|>' not in text and "<escape>" not in text))
def test_strings_of_gemma_hold_anything(text: str) -> None:
    for delimiter, dialect in (('<|"|>', GEMMA), ("<escape>", FUNCTION_GEMMA)):
        said = transcode(f"{{a-b:[{delimiter}{text}{delimiter}],c:{{d:1.5}}}}", dialect)
        assert said is not None
        assert json.loads(said) == {"a-b": [text], "c": {"d": 1.5}}


def test_depth_and_length_have_bounds() -> None:
    for dialect in (JSON, PYTHON):
        assert transcode("[" * DEPTH_MAX + "]" * DEPTH_MAX, dialect) is not None
        assert transcode("[" * 10**5, dialect) is None
        assert transcode("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), dialect) is None
        assert transcode("1" * (ATOM_CHARACTERS_MAX + 1), dialect) is None
