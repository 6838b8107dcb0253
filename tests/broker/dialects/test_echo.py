"""Echo of a prompt: its exact text, and the text offsets of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.echo import Echo
from protocol.messages import PromptLogprobs
from protocol.types import PromptToken
from tests.factories import accepted


def scored(first: int, pieces: Sequence[bytes]) -> PromptLogprobs:
    tokens = [
        PromptToken(bytes=piece, logprob=None if first + index == 0 else -1.0)
        for index, piece in enumerate(pieces)
    ]
    return PromptLogprobs(incarnation="w", id="x", first=first, tokens=tokens)


def offsets(text: str | None, pieces: Sequence[bytes], *, said: str = "") -> list[int]:
    """Return the text offsets of all tokens, scored in one message."""
    echo = Echo(text, scored=True)
    echo.hear(accepted(prompt_tokens=len(pieces), prompt=said))
    echo.hear(scored(0, pieces))
    given_out, lists = echo.take()
    assert given_out == (said if text is None else text)
    assert lists is not None
    return list(lists["text_offset"])


def test_a_text_is_said_as_it_was_sent_once() -> None:
    echo = Echo("Once upon", scored=False)
    echo.hear(accepted(prompt_tokens=2))
    assert echo.take() == ("Once upon", None)
    assert echo.take() == ("", None)


def test_a_beginning_that_the_tokenizer_adds_takes_no_room() -> None:
    assert offsets("Once more", [b"<s>", b" Once", b" more"]) == [0, 0, 4]
    assert offsets(" Once", [b"<s>", b" Once"]) == [0, 0]


def test_letters_that_the_tokenizer_writes_otherwise_put_nothing_after_them_out_of_place() -> None:
    decomposed = "e\u0301tude and"
    assert offsets(decomposed, ["é".encode(), b"tude", b" and"]) == [0, 2, 6]


@settings(max_examples=40)
@given(st.text(min_size=1), st.data())
def test_joined_pieces_are_the_prompt_however_it_is_cut(text: str, data: Any) -> None:
    raw = text.encode(errors="replace")
    text = raw.decode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)), max_size=12)) | {len(raw)})
    pieces = [raw[first:last] for first, last in itertools.pairwise([0, *cuts])]
    echo = Echo(text, scored=True)
    echo.hear(accepted(prompt_tokens=len(pieces)))
    said, places = "", []
    parts = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    for first, last in itertools.pairwise(parts):
        echo.hear(scored(first, pieces[first:last]))
        more, lists = echo.take()
        said += more
        places += lists["text_offset"] if lists else []
    assert said == text
    assert len(places) == len(pieces)
    # A token's offset is that of the character which contains the token's first byte.
    begins = [len(raw[:at].decode(errors="ignore")) for at in [0, *cuts[:-1]]]
    assert places == begins
