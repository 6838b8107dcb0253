"""Conversation history, as sent in requests."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from deploy.console import chat_repl
from deploy.console.chat_repl import Conversation, ImageError, read_image


def test_messages_are_sent_in_order_after_the_system_prompt() -> None:
    said = Conversation(system="be brief")
    said.ask("one?")
    said.answered("1")
    said.ask("two?", ["data:image/png;base64,AA=="])
    assert said.told() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                {"type": "text", "text": "two?"},
            ],
        },
    ]
    said.forget()
    assert said.told() == [{"role": "system", "content": "be brief"}]


def test_unanswered_message_is_dropped_by_the_next_one() -> None:
    said = Conversation()
    said.ask("lost")
    said.ask("two?")
    assert [message["content"] for message in said.told()] == ["two?"]


def test_an_answer_can_be_had_anew() -> None:
    said = Conversation()
    assert not said.take_back()
    said.ask("one?")
    said.answered("1")
    assert said.take_back()
    assert said.take_back()
    assert [message["content"] for message in said.told()] == ["one?"]


def test_an_image_is_sent_as_it_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "a.JPG"
    path.write_bytes(b"\xff\xd8 and the rest")
    assert read_image(path) == f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_unreadable_or_oversized_image_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(b"12345")
    monkeypatch.setattr(chat_repl, "IMAGE_BYTES_MAX", 4)
    for path, why in (
        (tmp_path / "a.txt", "does not have the suffix of an image"),
        (tmp_path / "no.png", "cannot be read"),
        (large, "too large: 5 bytes"),
    ):
        with pytest.raises(ImageError, match=why):
            read_image(path)
