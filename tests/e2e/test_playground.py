"""*Connect* and the playground of the page at `/`, in a headless browser (`tests/browser/`)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import accessibility
from tests.browser.chromium import Page
from tests.browser.playground import answer_of, ask, choose, settle, visiting, wait_answered
from tests.system import System, eventually, running_system

DOT_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A PNG of one red pixel."""
PHONE, DESKTOP = (380, 800), (1440, 900)
LAST = ".turn:last-child"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a gateway with two scripted models, one of which reads images."""
    with running_system(tmp_path_factory.mktemp("system")) as system:
        system.start_worker("--images")
        system.start_worker("--served-name", "other")
        system.wait_loaded(2)
        yield system


@pytest.fixture
def page(tab: Page, system: System) -> Iterator[Page]:
    """Open the page and wait until it offers the models."""
    with visiting(tab, system.url):
        wait_offered(tab)
        yield tab


def wait_offered(page: Page) -> None:
    page.wait("document.querySelector('#model').options.length === 2", "the models are offered")


def reload(page: Page, first: str = "") -> None:
    """Load the page again. `first`: a script that runs before any of its own."""
    added = page.call("Page.addScriptToEvaluateOnNewDocument", source=first)
    page.run("window.isOld = true")
    page.call("Page.reload")
    page.wait("!window.isOld && document.readyState === 'complete'", "the page is loaded again")
    page.call("Page.removeScriptToEvaluateOnNewDocument", **added)
    wait_offered(page)


def clipboard(page: Page, system: System) -> Any:
    """Allow the page to use the clipboard, and return a function that reads it."""
    page.call(
        "Browser.grantPermissions",
        origin=system.url,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    return lambda: page.run("navigator.clipboard.readText()")


def turns(page: Page) -> int:
    return int(page.run("document.querySelectorAll('.turn').length"))


def wait_turns(page: Page, number: int) -> None:
    page.wait(f"document.querySelectorAll('.turn').length === {number}", f"there are {number} turns")


def chat(system: System, *texts: str, **body: Any) -> str:
    """Return the answer to a conversation, whose turns alternate, without the page."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    told = system.http.post(
        "/v1/chat/completions", json={"model": "fake", "messages": messages, **body}
    ).json()
    return str(told["choices"][0]["message"]["content"]).strip()


def test_connect_is_the_first_section_and_stays_closed_if_closed(page: Page, system: System) -> None:
    assert page.run("document.querySelector('main section section').className") == "connect"
    box = page.run("document.querySelector('#connect').getBoundingClientRect().toJSON()")
    assert box["bottom"] < 900, "it does not fit on the first screen"
    assert page.text("#connect-openai") == f"{system.url}/v1"
    assert page.text("#connect-anthropic") == system.url
    assert page.text("#connect-key") == "none"
    page.click("#connect summary")
    page.wait("localStorage.getItem('roundhouse-connect-closed')", "it is stored")
    reload(page)
    assert page.run("document.querySelector('#connect').open") is False


def test_a_conversation_survives_a_reload_and_goes_on(page: Page, system: System) -> None:
    settle(page, "seed", "7")
    settle(page, "system", "Be brief.")
    choose(page, "#model", "other")
    ask(page, "!tokens=5 first")
    first = wait_answered(page)
    page.type("#prompt", "!tokens=4 second")
    reload(page)
    assert turns(page) == 2
    assert page.text(f"{LAST} .text").strip() == first
    assert re.search(r"6 tokens · .*first token after", page.text(f"{LAST} .foot"))
    assert page.run("document.querySelector('[name=system]').value") == "Be brief."
    assert page.run("document.querySelector('#model').value") == "other"
    assert page.text("#settings-count") == "1 set"
    page.run("document.querySelector('#prompt').focus()")
    page.press("Enter")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "!tokens=5 first"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "!tokens=4 second"},
    ]
    assert wait_answered(page) == chat(system, messages=messages, model="other", seed=7)
    page.click("#fresh")
    wait_turns(page, 0)
    reload(page)
    assert turns(page) == 0


def test_an_answer_that_a_reload_interrupts_keeps_its_text(page: Page) -> None:
    ask(page, "!tokens=2000 !slow=30")
    page.wait(f"document.querySelector('{LAST} .text')?.innerText.length > 20")
    reload(page)
    assert len(page.text(f"{LAST} .text")) > 20
    # Which it is depends on whether the browser ends the stream or the page first.
    assert re.match("The (page was closed|connection was lost)", page.text(f"{LAST} .problem"))
    page.click(f"{LAST} .again")
    page.wait("!document.querySelector('#stop').hidden", "it is asked again")
    page.click("#stop")
    wait_answered(page)


def test_a_page_without_storage_works(page: Page) -> None:
    forbidden = (
        "for (const name of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    reload(page, forbidden)
    choose(page, "#theme", "dark")
    ask(page, "!tokens=3")
    assert wait_answered(page)
    page.click("#connect-clients button:nth-child(2)")
    page.wait("document.querySelector('#connect-snippet').innerText.startsWith('from openai import OpenAI')")


def test_a_question_is_edited_or_deleted_with_its_answer(page: Page, system: System) -> None:
    ask(page, "!tokens=4 one")
    wait_answered(page)
    ask(page, "!tokens=4 two")
    second = wait_answered(page)
    page.click(".turn:nth-child(1) .drop")
    wait_turns(page, 2)
    assert page.text(f"{LAST} .text").strip() == second
    ask(page, "!tokens=3 three")
    assert wait_answered(page) == chat(system, "!tokens=4 two", second, "!tokens=3 three")

    page.click(".turn:nth-child(1) .change")
    page.wait("document.activeElement.value === '!tokens=4 two'", "the editor has the focus")
    assert page.text(".edit .hint") == "Replaces the turns that follow."
    page.press("Escape")
    page.wait("!document.querySelector('.edit')")
    assert page.run("document.activeElement.className") == "link change"
    page.click(".turn:nth-child(1) .change")
    page.wait("document.querySelector('.edit')")
    page.call("Input.insertText", text=" and a half")
    page.click(".edit [type=submit]")
    wait_turns(page, 2)
    answered = wait_answered(page)
    assert page.text(".turn:first-child .text") == "!tokens=4 two and a half"
    assert answered == answer_of(system, "!tokens=4 two and a half")


def test_stopped_answer_keeps_text_and_figures_and_frees_the_worker(page: Page, system: System) -> None:
    ask(page, "!tokens=2000 !slow=30")
    page.wait(f"document.querySelector('{LAST} .text')?.innerText.length > 20")
    page.click("#stop")
    assert len(wait_answered(page)) > 20
    figures = r"/^\d+ tokens · [\d.]+\/s · first token after .* · stopped/"
    page.wait(f"{figures}.test(document.querySelector('{LAST} .foot').innerText)")
    [end, *_] = system.http.get("/v1/status").json()["recent"]["ends"]
    assert end["code"] == "client_left"
    assert page.text(f"{LAST} .foot").startswith(f"{end['answered']} tokens")
    page.click(f"{LAST} .again")
    page.wait("!document.querySelector('#stop').hidden", "it is asked again")
    page.click("#fresh")
    page.wait("document.querySelectorAll('.turn').length === 0 && document.querySelector('#stop').hidden")


def test_a_conversation_is_exported(page: Page, system: System, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    read = clipboard(page, system)
    ask(page, "!tokens=5 It's")
    answered = wait_answered(page)

    page.click("#export summary")
    page.click("#export-curl")
    page.wait("document.querySelector('#export-curl').innerText === 'Copied'")
    done = subprocess.run(["bash", "-euc", read()], capture_output=True, text=True, timeout=60, check=True)
    chunks = [json.loads(text) for text in re.findall(r"^data: (\{.*)$", done.stdout, re.MULTILINE)]
    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert told.strip() == answered

    page.click("#export-markdown")
    page.click("#export-json")
    files = [tmp_path / "conversation.md", tmp_path / "conversation.json"]
    eventually(lambda: all(file.exists() and file.stat().st_size for file in files), within_s=60)
    assert files[0].read_text().strip() == f"## User\n\n!tokens=5 It's\n\n## Assistant\n\n{answered}"
    body = json.loads(files[1].read_text())
    assert [message["content"].strip() for message in body["messages"]] == ["!tokens=5 It's", answered]
    assert system.http.post("/v1/chat/completions", json=body | {"stream": False}).status_code == 200

    page.press("Escape")
    page.wait("!document.querySelector('#export').open")


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESKTOP, False)], ids=["phone", "desktop"])
def test_page_has_no_accessibility_defects(page: Page, size: tuple[int, int], dark: bool) -> None:
    page.size(*size)
    page.dark(dark=dark)
    for view in ("playground", "overview"):
        page.run(f"location.hash = '{view}'")
        page.wait(f"document.querySelector('.{view}').offsetParent !== null")
        if view == "playground":
            page.run("document.querySelector('#settings').open = true")
            ask(page, "!tokens=5 !think=2")
            wait_answered(page)
            page.click(".turn:first-child .change")
            page.wait("document.querySelector('.edit')")
        assert accessibility.defects(page) == []


def test_playground_answer_matches_the_api(page: Page, system: System) -> None:
    ask(page, "!tokens=12 !think=5")
    assert wait_answered(page) == answer_of(system, "!tokens=12 !think=5")
    assert page.run("document.querySelector('.turn:last-child .thought').open") is False
    assert page.text(".turn:last-child .thought summary").startswith("Reasoned for")
    assert "token" in page.text(".turn:last-child .foot")
    assert page.text("#spoken").split() == page.text(".turn:last-child .text").split()


def test_calls_are_shown_and_replied_to(page: Page) -> None:
    settle(page, "tools", '[{"name": "note", "parameters": {"type": "object"}}]')
    ask(page, "!tokens=8 !call=1")
    wait_answered(page)
    page.wait("document.querySelector('.called')?.innerText === 'note'")
    json.loads(page.text(".call pre"))
    page.type(".call textarea", "noted")
    page.click(".call button")
    page.wait("document.querySelectorAll('.turn').length === 4", "the reply, and an answer to it")
    assert page.text(".turn:nth-child(3) .speaker") == "Result of note"
    wait_answered(page)


def test_an_image_is_dropped_shown_and_sent(page: Page) -> None:
    page.run(
        f"(() => {{ const bytes = Uint8Array.from(atob('{DOT_PNG}'), c => c.charCodeAt(0));"
        "const dataTransfer = new DataTransfer();"
        "dataTransfer.items.add(new File([bytes], 'dot.png', {type: 'image/png'}));"
        "document.querySelector('.playground').dispatchEvent("
        "new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true})); })()"
    )
    page.wait("document.querySelectorAll('#images img').length === 1")
    ask(page, "What is it? !tokens=4")
    assert wait_answered(page)
    assert page.run("document.querySelectorAll('#images img').length") == 0
    assert page.run("document.querySelector('.turn .images img').src.startsWith('data:image/png')")
    reload(page)
    assert page.run("document.querySelector('.turn .images img').src.startsWith('data:image/png')")
