"""Parser of chat input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.console.chat_repl import (
    ALIASES,
    HELP,
    VERBS,
    ChatCommand,
    ChatMessage,
    InvalidInput,
    Parameter,
    is_there,
    read,
    read_input,
    read_parameter,
)


def nothing(path: Path) -> bool:
    return False


def everything(path: Path) -> bool:
    return True


def test_commands_and_aliases_are_known_and_what_is_none_or_lacks_its_file_is_wrong() -> None:
    for verb in VERBS:
        assert read(f"/{verb}  some words ", nothing) == ChatCommand(verb, "some words")
        assert verb == "help" or f"/{verb}" in HELP
    for alias, verb in ALIASES.items():
        assert read(f"/{alias}", nothing) == ChatCommand(verb)
    assert isinstance(read("/nwe", nothing), InvalidInput)
    for verb in ("save", "image"):
        assert read(f"/{verb} ", nothing) == InvalidInput(f"write /{verb} FILE")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("temperature 0.2", Parameter("temperature", 0.2)),
        ("enable_thinking false", Parameter("enable_thinking", False)),
        ("stop " + 5000 * "[", Parameter("stop", 5000 * "[")),
        ("temprature 1", InvalidInput("unknown parameter temprature; did you mean temperature?")),
    ],
)
def test_parameter_values_are_json_or_strings(text: str, found: Parameter | InvalidInput) -> None:
    assert read_parameter(text) == found
    assert isinstance(read_parameter("messages 1"), InvalidInput), "it is no parameter"


def test_images_are_named_among_the_words_if_they_are_there() -> None:
    text = "what is in 'my photo.PNG' and b.jpg but not c.txt?"
    assert read(text, everything) == ChatMessage(text, (Path("my photo.PNG"), Path("b.jpg")))
    assert read(text, nothing) == ChatMessage(text)
    dropped = "/tmp/cat.png is what?"
    assert read(dropped, everything) == ChatMessage(dropped, (Path("/tmp/cat.png"),))


@given(st.text(max_size=400))
def test_whatever_is_typed_is_read(text: str) -> None:
    assert isinstance(read(text, is_there), ChatMessage | ChatCommand | InvalidInput)


@given(st.lists(st.text(alphabet=st.characters(exclude_characters='"\n\r'), max_size=20), max_size=6))
def test_quoted_lines_come_back_as_they_went_in(lines: list[str]) -> None:
    typed = iter(['"""', *lines, ' """'])
    assert read_input(lambda prompt: next(typed)) == "\n".join(lines)
