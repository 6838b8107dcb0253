"""Content parts of messages: images as markers in a text, and images of results behind them."""

from __future__ import annotations

from typing import Any

from worker.input.media.preprocessing import kinds_in, texts_of, with_images_behind, with_marks

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def test_images_become_markers_for_a_template_that_reads_text() -> None:
    seen: list[Any] = []
    render = with_marks(lambda messages, **options: seen.append((messages, options)), "<image>")
    render(
        [message("user", text("What is "), IMAGE, text("this?")), {"role": "assistant", "content": None}], a=1
    )
    [(messages, options)] = seen
    assert [each["content"] for each in messages] == ["What is <image>\nthis?", None]
    assert options == {"a": 1}


def test_images_of_results_and_answers_follow_them_in_a_question() -> None:
    results = [message("tool", text("one "), IMAGE, text("file")), message("tool", IMAGE, VIDEO)]
    question = message("user", IMAGE, text("And?"))
    assert with_images_behind([*results, question]) == [
        {"role": "tool", "content": "one file"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": [IMAGE, IMAGE, VIDEO]},
        question,
    ]
    assert with_images_behind([question, message("assistant", IMAGE)])[1:] == [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [IMAGE]},
    ]
    plain = [question, {"role": "assistant", "content": "Two."}]
    assert with_images_behind(plain) == plain


def test_what_a_conversation_holds_is_found() -> None:
    messages = [message("user", IMAGE, text("a")), {"role": "tool", "content": "b"}, message("user", VIDEO)]
    assert kinds_in(messages) == ["image", "video"]
    assert texts_of([*messages, {"role": "assistant", "content": None}]) == ["a", "b"]
