"""The page at `/` in a headless browser: the overview, keys, and streams that survive a worker death.

Collected only if there is a browser (`tests/browser/`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import chromium
from tests.browser.chromium import Browser, Page
from tests.browser.playground import answer_of, ask, choose, wait_answered
from tests.system import System, running_system

KEY = "sesame"
WIDTHS = (380, 768, 1440)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium.running() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, fake_system: System) -> Iterator[Page]:
    """Open the page and wait until it offers a model."""
    page = browser.open(fake_system.url)
    page.wait("document.querySelector('#model').value === 'fake'", "there is a model")
    yield page
    assert page.complaints() == []
    page.close()


# --- page rules ---


def test_a_worker_dies_and_the_page_shows_it_while_the_stream_goes_on(
    page: Page, fake_system: System
) -> None:
    prompt = "!tokens=120 !slow=25"
    expected = answer_of(fake_system, prompt)
    ask(page, prompt)
    page.wait("document.querySelector('.turn:last-child .text')?.innerText.length > 40", "it answers")

    fake_system.workers[0].kill()
    page.wait("document.querySelector('#verdict').innerText.includes('Lost the worker of fake')", "the death")
    assert page.text("#announced").startswith("Lost the worker of fake")
    assert "connection lost" in page.text("#models .trouble")
    assert "lost: connection lost" in page.text("#events")
    page.wait(
        "document.querySelector('#requests .status')?.innerText === 'waiting for the next worker'", "it waits"
    )
    page.wait("document.querySelector('.turn:last-child .foot')?.innerText.startsWith('the worker was lost')")
    page.wait("document.querySelector('.plot .pause')", "the pause in the charts")
    told = page.text(".turn:last-child .text")
    assert 40 < len(told) < len(expected)

    fake_system.start_worker()
    page.wait("document.querySelector('#verdict').innerText.includes('Serving 1 model')", "the return")
    assert wait_answered(page) == expected
    assert page.text(".turn:last-child .problem") == ""
    page.wait("/fake ready.*after/s.test(document.querySelector('#events').innerText)", "how long it took")
    page.click("#requests .open")
    page.wait("document.querySelector('#requests .facts').innerText.includes('resumed once')", "its history")
    assert page.run("document.querySelectorAll('.waterfall [data-phase=paused]').length") == 1


# --- the overview ---


def test_the_overview_is_drawn_from_what_happens(page: Page) -> None:
    ask(page, "!tokens=60 !slow=30")
    page.wait("document.querySelector('#requests .status')?.innerText === 'decode'", "the active request")
    assert page.text("#requests-count") == "1 active request"
    assert "ready · pid" in page.text("#models")
    page.wait("document.querySelector('.chart .line-1').getAttribute('d').includes('L')", "a line")
    page.wait("parseFloat(document.querySelector('.chart .now').innerText) > 5", "tokens per second")
    wait_answered(page)
    page.wait("document.querySelector('#requests .status').innerText === 'stop'", "its end")
    assert page.text("#requests-count") == ""


def test_a_failure_is_told_where_it_happened_and_in_the_overview(page: Page) -> None:
    ask(page, "!fail=3")
    wait_answered(page)
    assert page.text(".turn:last-child .problem") != ""
    page.wait("document.querySelector('#requests').innerText.includes('engine error')")


def test_a_gateway_that_is_gone_is_missed_and_found_again(browser: Browser, fake_system: System) -> None:
    page = browser.open(fake_system.url)
    page.wait("document.querySelector('#verdict').innerText.includes('Serving')")
    fake_system.restart_gateway()
    page.wait(
        "document.querySelector('#about').innerText.includes('up') && "
        "/Serving/.test(document.querySelector('#verdict').innerText)",
        "it is found again",
    )
    page.close()


# --- request inspection ---


def test_a_request_is_looked_into(browser: Browser, tmp_path: Path) -> None:
    with running_system(tmp_path, ["--inspect"]) as system:
        system.start_worker()
        page = browser.open(system.url)
        page.wait("document.querySelector('#model').value === 'fake'")
        ask(page, "A question !tokens=5")
        answered = wait_answered(page)
        page.wait("document.querySelector('#requests .status')?.innerText === 'stop'", "its end")
        page.click("#requests .open")
        page.click("#requests .inspect")
        page.wait("document.querySelector('#look').open")
        assert page.text("#look-prompt").split() == ["signal", "rails", "whistle"]
        assert '"stream": true' in page.text("#look-body")
        assert "0 of 3 prompt tokens came from the cache" in page.text("#look-reuse")
        page.click("#look-likely")
        page.wait("document.querySelectorAll('#look-answer .token').length >= 5")
        assert page.text("#look-answer") == f"{answered} ▪"  # the end token has no text
        assert page.run("document.querySelector('#look-answer .token').title").startswith("61%")
        page.press("Escape")
        page.wait("!document.querySelector('#look').open")
        assert page.complaints() == []
        page.close()


def test_inspection_is_hidden_unless_enabled(page: Page) -> None:
    ask(page, "!tokens=3")
    wait_answered(page)
    page.wait("document.querySelector('#requests .status')?.innerText === 'stop'", "its end")
    page.click("#requests .open")
    assert page.run("document.querySelector('#requests .inspect').hidden")


# --- keys ---


def test_a_key_is_asked_for_and_kept_for_this_tab(browser: Browser, tmp_path: Path) -> None:
    with running_system(tmp_path, ["--api-key", KEY]) as system:
        system.start_worker()
        page = browser.open(system.url)
        page.wait("document.querySelector('#key-dialog').open", "it asks")
        page.type("#key", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-why').innerText.includes('Incorrect')", "it says why")
        page.wait("document.querySelector('#key-dialog').open", "it asks again")
        page.type("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#model').value === 'fake'", "it is let in")
        ask(page, "!tokens=3")
        assert wait_answered(page)
        assert page.run("Object.keys(localStorage).length") == 0
        stored = json.loads(page.run("JSON.stringify(sessionStorage)"))
        assert stored.pop("roundhouse-key") == KEY
        assert KEY not in json.dumps(stored)
        assert page.text("#connect-key") == "••••••••"
        assert KEY not in page.text("body")
        page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.run("document.addEventListener('copy', event => { window.copied = event.target.value; })")
        page.click("#connect-copy")
        page.wait("window.copied")
        assert f"authorization: Bearer {KEY}" in page.run("window.copied")
        page.close()


def test_a_page_without_a_key_lists_no_errors_of_its_own(browser: Browser, tmp_path: Path) -> None:
    with running_system(tmp_path, ["--api-key", KEY]) as system:
        system.start_worker()
        page = browser.open(system.url)
        page.wait("document.querySelector('#key-dialog').open", "it asks")
        assert "YOUR_API_KEY" in page.run("document.querySelector('#connect-snippet').textContent")
        page.type("#key", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-why').innerText.includes('Incorrect')", "it says why")
        page.press("Escape")
        page.wait("document.querySelector('#verdict').innerText.includes('Incorrect')", "it gives up")
        ask(page, "!tokens=3")
        page.wait("document.querySelector('#key-dialog').open", "it asks before it sends anything")
        page.type("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#model').value === 'fake'", "it is let in")
        refusals = system.http.get("/v1/status", headers={"x-api-key": KEY}).json()["recent"]["refusals"]
        assert [refusal["path"] for refusal in refusals if refusal["status"] == 401] == []
        page.close()


# --- appearance ---


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", ["overview", "playground"])
def test_page_content_does_not_overflow(page: Page, width: int, view: str) -> None:
    page.size(width, 800)
    page.run("location.hash = 'playground'")
    page.wait("document.querySelector('#prompt').offsetParent !== null")
    ask(page, "!tokens=3 " + "long" * 40)
    wait_answered(page)
    page.run(f"location.hash = '{view}'")
    page.wait(f"document.querySelector('.{view}').offsetParent !== null")
    assert page.run("document.documentElement.scrollWidth") <= width
    over = page.run(
        "[...document.querySelectorAll('main *')].filter(e => e.offsetParent && !e.closest('svg, .unseen')"
        f" && e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert over == []


def test_light_and_dark_follow_the_system_until_somebody_chooses(page: Page) -> None:
    def ground() -> str:
        return str(page.run("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    page.dark(dark=True)
    dark = ground()
    assert light != dark
    choose(page, "#theme", "light")
    assert ground() == light
    choose(page, "#theme", "")
    assert ground() == dark


def test_everything_can_be_reached_by_keyboard_and_shows_where_it_is(page: Page) -> None:
    wanted = {"theme", "model", "fresh", "prompt", "file", "send"}
    reached: set[str] = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id"))
        shown = page.run(
            "(e => e === document.body || [e, e.closest('label') ?? e].some("
            "n => getComputedStyle(n).outlineStyle !== 'none'))(document.activeElement)"
        )
        assert shown, page.run("document.activeElement.outerHTML.slice(0, 120)")
    assert wanted <= reached
