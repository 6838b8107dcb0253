"""The overview of the page at `/` in a headless browser: charts, models on demand, the table of requests.

Collected only if there is a browser (`tests/browser/`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.browser import chromium
from tests.browser.chromium import Browser, Page
from tests.faults.several import Scripted, Several, several
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import eventually

ROWS = "[...document.querySelectorAll('#requests tr.row')]"
WIDTHS = (380, 768, 1440)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Run a server with one loaded model and one that is loaded on demand."""
    models = Scripted("fake", resident=True), Scripted("small", flags="--load 1")
    with several(tmp_path_factory.mktemp("served"), *models, gateway_flags="--inspect") as served:
        served.wait_for(fake="loaded")
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Several) -> Iterator[Page]:
    """Open the page and wait until it shows the models."""
    page = browser.open(served.url)
    page.wait("document.querySelectorAll('#models .card').length === 2", "both models")
    yield page
    assert page.complaints() == []
    page.close()


def choose(page: Page, name: str, value: str) -> None:
    """Set a control of the filter like a user, including the event."""
    told = f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}}))"
    page.run(f"(e => {{ {told} }})(document.querySelector('#filter [name={name}]'))")


def open_row(page: Page, status: str) -> None:
    """Open the newest row with a status, by keyboard."""
    page.wait(f"{ROWS}.some(row => row.querySelector('.status').innerText === {status!r})", status)
    row = f"{ROWS}.find(row => row.querySelector('.status').innerText === {status!r})"
    page.run(f"{row}.querySelector('.open').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#requests .opened') !== null", "it is open")


# --- requests ---


def test_requests_are_listed_filtered_and_opened(page: Page, served: Several) -> None:
    for text in ("one !tokens=20", "two !fail=3"):
        wait_for([ask(served.url, text, model="fake")], 30)
    page.wait(f"{ROWS}.length >= 2", "both requests")
    choose(page, "group", "failed")
    page.wait(f"{ROWS}.every(row => row.innerText.includes('engine error'))", "only the failed one")
    choose(page, "group", "")
    choose(page, "text", "zzz")
    page.wait("!document.querySelector('#requests-empty').hidden", "no request is left")
    assert page.text("#requests-empty") == "No request matches the filter."
    choose(page, "text", "stop")
    open_row(page, "stop")
    phases = page.run("[...document.querySelectorAll('.filled')].map(e => e.dataset.phase)")
    assert phases[-1] == "decode"
    assert "prompt token" in page.text("#requests .facts")
    page.click("#requests .inspect")
    page.wait("document.querySelector('#look').open && document.querySelector('#look-body').innerText !== ''")
    page.press("Escape")
    page.wait("!document.querySelector('#look').open", "the inspector is closed")
    page.run("document.querySelector('#requests [aria-expanded=true]').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#requests .opened') === null", "the row is closed")


def test_a_request_is_cancelled_from_its_row(page: Page, served: Several) -> None:
    client = ask(served.url, "!tokens=5000 !slow=20", model="fake")
    wait_until_flowing([client])
    open_row(page, "decode")
    page.click("#requests .cancel")
    wait_for([client], 30)
    assert client.error == "request_cancelled"
    page.wait(f"{ROWS}[0].querySelector('.status').innerText === 'request cancelled'", "its end")
    page.wait("document.querySelector('#requests .cancel').hidden", "it has ended")


@pytest.mark.parametrize("width", WIDTHS)
def test_an_open_row_does_not_overflow(page: Page, served: Several, width: int) -> None:
    wait_for([ask(served.url, f"{'long ' * 40}!tokens=5", model="fake")], 30)
    page.size(width, 800)
    page.wait(f"{ROWS}.length > 0", "a request")
    page.run("document.querySelector('#requests .open').click()")
    page.wait("document.querySelector('#requests .opened') !== null", "it is open")
    assert page.run("document.documentElement.scrollWidth") <= width
    over = page.run(
        "[...document.querySelectorAll('.overview *')].filter(e => e.offsetParent && !e.closest('svg'))"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert over == []


# --- models ---


def test_a_model_is_loaded_and_unloaded_from_its_card(page: Page, served: Several) -> None:
    card = "document.querySelector('#models [data-key=\"small\"]')"
    assert page.run(f"{card}.querySelector('.unload').hidden")
    assert page.run("document.querySelector('#models [data-key=fake] .unload').hidden"), "it is resident"
    page.click("#models .load:not([hidden])")
    page.wait(f"{card}.querySelector('.state').innerText === 'loaded'", "it is loaded")
    page.click("#models .unload:not([hidden])")
    page.wait(f"{card}.querySelector('.state').innerText === 'unloaded'", "it is unloaded")
    page.wait(
        "document.querySelector('#events').innerText.includes('small stopped')", "its worker has stopped"
    )
    page.wait("document.querySelector('#verdict').innerText.includes('Serving 1 model')", "nothing is wrong")
    assert page.run("document.querySelector('.plot .pause')") is None, "an intended shutdown is no pause"


def test_a_model_in_use_is_not_unloaded(page: Page, served: Several) -> None:
    client = ask(served.url, "!tokens=5000 !slow=20", model="small")
    wait_until_flowing([client])
    page.wait("document.querySelector('#models .unload:not([hidden])') !== null", "it is loaded")
    page.click("#models .unload:not([hidden])")
    page.wait("document.querySelector('#models .refused:not(:empty)') !== null", "the reason")
    assert "has requests in flight" in page.run("document.querySelector('.refused:not(:empty)').innerText")
    open_row(page, "decode")
    page.click("#requests .cancel")
    wait_for([client], 30)
    page.wait("document.querySelector('#requests-count').innerText === ''", "no request is active")
    page.click("#models .unload:not([hidden])")
    eventually(lambda: not served.pids("small"), within_s=30, what="its worker is gone")


# --- charts ---


def test_pointer_and_keys_move_one_cursor_through_all_charts(page: Page, served: Several) -> None:
    wait_for([ask(served.url, "!tokens=5", model="fake")], 30)
    cursors = "[...document.querySelectorAll('.chart .cursor')].filter(e => !e.hidden).length"
    value = "document.querySelector('.plot').getAttribute('aria-valuetext')"
    page.wait(f"{value} !== '–'", "a sample")
    page.run("document.querySelector('.plot').focus()")
    page.press("ArrowLeft")
    assert page.run(cursors) == 6
    assert re.fullmatch(r"\d\d:\d\d:\d\d: \S+", page.run(value)), page.run(value)
    assert page.run("/^\\d\\d:\\d\\d:\\d\\d$/.test(document.querySelector('.legend .span').innerText)")
    page.press("Escape")
    assert page.run(cursors) == 0
    box = page.run("document.querySelectorAll('.plot')[1].getBoundingClientRect().toJSON()")
    place = {"x": box["right"] - 1, "y": box["y"] + box["height"] / 2}
    page.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
    page.wait(f"{cursors} === 6", "the cursor")
    assert re.fullmatch(r"\d\d:\d\d:\d\d: \S+", page.run(value)), page.run(value)
