"""Chat REPL with an endpoint played by the test."""

from __future__ import annotations

import base64
import json
import readline
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from deploy.console import chat_repl
from deploy.console.chat_repl import ChatRepl, ImageError, lines_with_history, read_image


class Played:
    """Endpoint that gives prepared answers in order, and records the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[httpx.Response] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.read()))
        return self.answers.pop(0)

    def will_say(self, text: str, thought: str = "", reason: str = "stop") -> None:
        deltas = [{"reasoning_content": thought}] if thought else []
        deltas += [{"content": text[:3]}, {"content": text[3:]}]
        documents = [{"choices": [{"delta": delta}]} for delta in deltas]
        documents.append({"choices": [{"delta": {}, "finish_reason": reason}]})
        body = "".join(f"data: {json.dumps(document)}\n\n" for document in documents) + "data: [DONE]\n\n"
        self.answers.append(httpx.Response(200, content=body.encode()))


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def talking(played: Played) -> Iterator[ChatRepl]:
    console = Console(width=100, force_terminal=False, record=True)
    with httpx.Client(base_url="http://played", transport=httpx.MockTransport(played)) as client:
        yield ChatRepl(client, console, "m")


def converse(talking: ChatRepl, *typed: str | type[BaseException]) -> str:
    """Type the lines, and return the output."""
    left = list(typed)

    def read_line(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    talking.run(read_line)
    assert not left
    return talking.console.export_text()


def test_each_question_brings_all_that_was_said_before(talking: ChatRepl, played: Played) -> None:
    played.will_say("Hello **you**")
    played.will_say("Again")
    shown = converse(talking, "Hi", "/system be brief", "And?")
    assert "Hello you" in shown
    assert [message["content"] for message in played.asked[1]["messages"]] == [
        "be brief", "Hi", "Hello **you**", "And?",
    ]  # fmt: skip
    asked = {name: played.asked[0][name] for name in ("model", "messages")}
    assert asked == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_commands_change_what_is_asked(talking: ChatRepl, played: Played, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"png")
    played.will_say("one")
    played.will_say("two")
    shown = converse(talking, "first", "/clear", "/model other", f"/image {image}", "second", "/nothing")
    assert "unknown command /nothing" in shown
    assert played.asked[1]["model"] == "other"
    [message] = played.asked[1]["messages"]
    picture, text = message["content"]
    assert picture["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(b'png').decode()}"
    assert text == {"type": "text", "text": "second"}


def test_conversation_is_saved_beside_old_files(talking: ChatRepl, played: Played, tmp_path: Path) -> None:
    played.will_say("Hello **you**")
    text, messages = tmp_path / "a chat.md", tmp_path / "chat.json"
    shown = converse(
        talking, "/system be brief", "Hi", f"/save {text}", f"/save {messages}", f"/save {messages}"
    )
    assert text.read_text() == "## System\n\nbe brief\n\n## User\n\nHi\n\n## Assistant\n\nHello **you**\n"
    assert json.loads(messages.read_text()) == talking.conversation.request_messages()
    assert shown.count("saved in") == 2
    assert "File exists" in shown


def test_several_lines_are_one_question_and_ctrl_c_forgets_them(talking: ChatRepl, played: Played) -> None:
    played.will_say("well")
    converse(talking, '"""', "lost", KeyboardInterrupt, '"""', "one", "two", '"""', "  ", "/exit")
    assert played.asked[0]["messages"][0]["content"] == "one\ntwo"


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    talking: ChatRepl, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(client: httpx.Client, body: Any) -> Iterator[chat_repl.http.AnswerDelta]:
        yield chat_repl.http.AnswerDelta("text", "half of ")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_repl.http, "stream", stopped)
    shown = converse(talking, "Hi")
    assert "half of" in shown
    assert "stopped" in shown
    assert talking.conversation.messages[-1]["content"] == "half of "


def test_history_lasts_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "chat_history"
    monkeypatch.setattr(chat_repl, "HISTORY_LINES_MAX", 3)
    readline.clear_history()
    with lines_with_history(path):
        for line in ("one", "two", "three", "four"):
            readline.add_history(line)
    readline.clear_history()
    with lines_with_history(path):
        found = [readline.get_history_item(n) for n in range(1, 1 + readline.get_current_history_length())]
    assert found == ["two", "three", "four"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    readline.clear_history()


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


def test_parameters_and_reasoning_are_shown_and_retry_asks_again(talking: ChatRepl, played: Played) -> None:
    played.will_say("Hello", thought="A greeting.")
    played.will_say("Hello again")
    typed = ["/retry", "/set", "Hi", "/set temperature 0.5", "/set stop x", "/set stop", "/set warmth 1"]
    shown = converse(talking, *typed, "/thought", "/retry", "/thought", "/set", "/model", "/help")
    asked = [message["content"] for message in played.asked[1]["messages"]]
    assert (asked, played.asked[1]["temperature"], "stop" in played.asked[1]) == (["Hi"], 0.5, False)
    assert [message["content"] for message in talking.conversation.messages] == ["Hi", "Hello again"]
    for line in (
        "there is no question to send again", "no parameters are set", 'stop = "x"', "temperature = 0.5",
        "unknown parameter warmth", "A greeting.", "no reasoning",
    ):  # fmt: skip
        assert line in shown


def test_unanswered_question_is_replaced_by_the_next_or_sent_again(talking: ChatRepl, played: Played) -> None:
    failure = {"error": {"message": "no worker", "code": "overloaded"}}
    played.answers = [httpx.Response(503, json=failure), httpx.Response(503, json=failure)]
    played.will_say("Well")
    shown = converse(talking, "one", "two", "/retry")
    assert shown.count("/retry sends it again") == 2
    assert [message["content"] for message in played.asked[2]["messages"]] == ["two"]
    assert [message["content"] for message in talking.conversation.messages] == ["two", "Well"]
