"""Actions of a user of the playground, for tests of the page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tests.browser.chromium import HEIGHT, WIDTH, Page
from tests.system import System, chat_body


@contextlib.contextmanager
def visiting(tab: Page, url: str) -> Iterator[None]:
    """Open the page as in a new tab, which takes twice the time, and assert that it has not complained."""
    tab.size(WIDTH, HEIGHT)
    tab.dark(dark=False)
    tab.go(url)
    yield
    complaints = tab.complaints()
    tab.go(f"{url}/health")  # where no script stores what is left behind
    tab.run("(localStorage.clear(), sessionStorage.clear())")
    assert complaints == []


def ask(page: Page, text: str) -> None:
    page.type("#prompt", text)
    page.press("Enter")


def wait_answered(page: Page) -> str:
    """Wait until the last answer has ended, and return its text."""
    page.wait(
        "document.querySelector('#stop').hidden && document.querySelector("
        "'.turn:last-child[data-role=assistant]:not(.going)') !== null",
        "an answer has ended",
    )
    return page.text(".turn:last-child .text").strip()


def choose(page: Page, selector: str, value: str, event: str = "change") -> None:
    """Set a control like a user, including the event."""
    told = f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}', {{bubbles: true}}))"
    page.run(f"(e => {{ {told} }})(document.querySelector({json.dumps(selector)}))")


def settle(page: Page, name: str, value: str) -> None:
    """Set a sampling setting of the playground."""
    choose(page, f"[name={name}]", value, "input")


def answer_of(system: System, text: str) -> str:
    """Return the answer to the same request without the page."""
    told = system.http.post("/v1/chat/completions", json=chat_body(text, model="fake")).json()
    return str(told["choices"][0]["message"]["content"]).strip()
