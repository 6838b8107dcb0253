"""Calls in every format, split anywhere, compared with the original calls and with upstream's parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.worker.output.calls.parsed_answers import ParsedAnswer, in_pieces, schemas_in
from tests.worker.output.calls.written import FORMATS, NAMES, WORDS, Call, Format, calls_in, tools_for
from worker.input.prompts.markup import PLAIN_THOUGHTS
from worker.output.calls.formats import READERS
from worker.output.calls.parser import is_in_code
from worker.output.calls.source import CLOSINGS

SPACES = " \t\r\n"
MARKS = ["<tool_call>", "</tool_call>", "<function", "[TOOL_CALLS]", "{", '"name"', "<invoke", "<|", "call:"]
surroundings = st.lists(
    st.sampled_from([word for word in WORDS if not any(mark in word for mark in MARKS)]), max_size=4
).map("".join)
CLOSED = re.compile(r"[ \t\r\n}\])]*(" + "|".join(map(re.escape, CLOSINGS)) + ")")
"""Text that belongs to the call before it, because models write too many closings."""
THOUGHTS = tuple(start for start, _ in PLAIN_THOUGHTS)
every_format = pytest.mark.parametrize("name", FORMATS)
thorough = settings(max_examples=12)


def cuts_of(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def shown(texts: Sequence[str]) -> str:
    """Return the texts around calls that count as content: all except white space alone."""
    return "".join(text for text in texts if text.strip(SPACES))


def written(form: Format, groups: Sequence[Sequence[Call]], around: Sequence[str]) -> str:
    text = around[0]
    for calls, behind in zip(groups, around[1:], strict=True):
        text += form.write(calls) + behind
    return text


@every_format
@given(data=st.data())
@thorough
def test_calls_between_texts_come_out_whole_as_upstream_reads_them(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    calls = data.draw(calls_in(form))
    groups = [[call] for call in calls] if data.draw(st.booleans()) else [calls]
    around = data.draw(st.lists(surroundings, min_size=len(groups) + 1, max_size=len(groups) + 1))
    assume(not any(CLOSED.match(text) for text in around[1:]))
    assume(not any(is_in_code("".join(around[:count])) for count in range(1, len(around))))
    text = written(form, groups, around)
    assume(not text.lstrip().startswith(THOUGHTS))
    tools = schemas_in(tools_for(calls))
    whole = in_pieces(tools, [text], has_ended=True)
    assert whole.parsed() == calls
    assert [list(arguments) for _, arguments in whole.parsed()] == [list(arguments) for _, arguments in calls]
    assert whole.text == shown(around)
    assert whole.whole == list(range(len(calls)))
    assert in_pieces(tools, text, has_ended=True) == whole
    assert in_pieces(tools, cuts_of(data.draw, text), has_ended=True) == whole
    if all(arguments for _, arguments in calls) or not form.needs_arguments:
        assert form.by_upstream(calls, tools_for(calls)) == calls
    single = in_pieces(tools, form.write(calls) + "more", single=True)
    assert (single.parsed(), single.text) == (calls[:1], "")


@every_format
@given(data=st.data())
@thorough
def test_an_answer_cut_anywhere_keeps_what_was_given_out(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    calls = data.draw(calls_in(form, 2))
    before = data.draw(surroundings)
    text = before + form.write(calls)
    assume(not is_in_code(before))
    assume(not text.lstrip().startswith(THOUGHTS))
    tools = schemas_in(tools_for(calls))
    whole = in_pieces(tools, [text])
    place = data.draw(st.integers(0, len(text)))
    cut = in_pieces(tools, [text[:place]])
    assert in_pieces(tools, text[:place]) == cut
    check_unfinished(cut)
    for part, all_of_it in zip(cut.calls, whole.calls, strict=False):
        assert part[:2] == all_of_it[:2]
        assert all_of_it[2].startswith(part[2])
    marker = max((each for each in READERS if text.startswith(each, len(before))), key=len, default="")
    is_text = place < len(before) + len(marker)
    assert cut.text == (text[:place] if is_text or place == len(before) else shown([before]))
    required = in_pieces(tools, [text[len(before) : place]], only=True)
    assert (required.text, len(required.calls)) == ("", len(cut.calls))
    ended = in_pieces(tools, [text[:place]], has_ended=True)
    assert in_pieces(tools, text[:place], has_ended=True) == ended
    check_unfinished(ended)
    for (_, name_ended, arguments), (_, name_cut, cut_arguments) in zip(ended.calls, cut.calls, strict=True):
        assert name_ended == name_cut
        assert re.fullmatch(re.escape(cut_arguments) + r"[}\]]*", arguments)  # no value is completed


def check_unfinished(said: ParsedAnswer) -> None:
    """Check that arguments can be parsed exactly where the call is complete."""
    for index, (_, name, arguments) in enumerate(said.calls):
        assert name in NAMES
        if index in said.whole:
            assert isinstance(json.loads(arguments), dict)
        else:
            with pytest.raises(ValueError, match=r".*"):
                json.loads(arguments)


@every_format
@given(data=st.data())
@thorough
def test_whatever_is_damaged_nothing_is_invented_and_nothing_lost(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    calls = data.draw(calls_in(form, 2))
    text, tools, word = form.write(calls), schemas_in(tools_for(calls)), "QX7Z"
    place = data.draw(st.integers(0, len(text)))
    said = in_pieces(tools, text[:place] + word + text[place:], has_ended=True)
    # The attributes of tags are ignored, except for the names in them.
    if name not in ("kimi_k3", "muse_spark"):
        assert word in said.text + "".join(map("".join, said.calls))
    text = data.draw(surroundings) + text + data.draw(surroundings)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 5)))
        text = text[:start] + data.draw(st.sampled_from(WORDS) | st.just("")) + text[end:]
    assume(not text.lstrip().startswith(THOUGHTS))
    said = in_pieces(tools, [text], has_ended=True)
    assert in_pieces(tools, text, has_ended=True) == said
    check_unfinished(said)
    rest = iter(text)
    assert all(character in rest for character in said.text)
    if not said.calls:
        assert said.text == text
