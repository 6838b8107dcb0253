"""The overview of the page at `/` in a headless browser: requests, models, charts, keys, and streams that
survive a worker death."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.playground import answer_of, choose, visiting, wait_answered
from tests.browser.playground import ask as ask_page
from tests.faults.several import Scripted, Several, several
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import System, eventually, running_system

KEY = "sesame"
WIDTH = 380
ROWS = "[...document.querySelectorAll('#requests tr.row')]"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Run a server with one loaded model and one that is loaded on demand."""
    models = Scripted("fake", resident=True), Scripted("small", flags="--load 1")
    with several(tmp_path_factory.mktemp("served"), *models, gateway_flags="--inspect") as system:
        system.wait_for(fake="loaded")
        yield system


@pytest.fixture
def page(tab: Page, system: Several) -> Iterator[Page]:
    """Open the page and wait until it shows the models."""
    with visiting(tab, system.url):
        tab.wait("document.querySelectorAll('#models .card').length === 2", "both models")
        yield tab


def test_page_shows_a_worker_death_while_the_stream_goes_on(browser: Browser, fake_system: System) -> None:
    page = browser.open(fake_system.url)
    page.wait("document.querySelector('#model').value === 'fake'", "there is a model")
    prompt = "!tokens=120 !slow=25"
    expected = answer_of(fake_system, prompt)
    ask_page(page, prompt)
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
    assert page.run("document.querySelector('#requests .inspect').hidden"), "it is not enabled"
    assert page.complaints() == []

    fake_system.restart_gateway()
    page.wait(
        "document.querySelector('#about').innerText.includes('up') && "
        "/Serving/.test(document.querySelector('#verdict').innerText)",
        "the next gateway is found",
    )
    page.close()


def filter_by(page: Page, name: str, value: str) -> None:
    """Set a control of the filter like a user, including the event."""
    choose(page, f"#filter [name={name}]", value, "input")


def open_row(page: Page, status: str) -> None:
    """Open the newest row with a status, by keyboard."""
    page.wait(f"{ROWS}.some(row => row.querySelector('.status').innerText === {status!r})", status)
    row = f"{ROWS}.find(row => row.querySelector('.status').innerText === {status!r})"
    page.run(f"{row}.querySelector('.open').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#requests .opened') !== null", "it is open")


def test_the_overview_is_drawn_from_what_happens(page: Page) -> None:
    choose(page, "#model", "fake")
    ask_page(page, "!tokens=60 !slow=30")
    page.wait("document.querySelector('#requests .status')?.innerText === 'decode'", "the active request")
    assert page.text("#requests-count") == "1 active request"
    assert "ready · pid" in page.text("#models")
    page.wait("document.querySelector('.chart .line-1').getAttribute('d').includes('L')", "a line")
    page.wait("parseFloat(document.querySelector('.chart .now').innerText) > 5", "tokens per second")
    wait_answered(page)
    page.wait("document.querySelector('#requests .status').innerText === 'stop'", "its end")
    assert page.text("#requests-count") == ""
    ask_page(page, "!fail=3")
    wait_answered(page)
    assert page.text(".turn:last-child .problem") != ""
    page.wait("document.querySelector('#requests').innerText.includes('engine error')")


def test_requests_are_listed_filtered_and_opened(page: Page, system: Several) -> None:
    for text in ("one !tokens=20", "two !fail=3"):
        wait_for([ask(system.url, text, model="fake")], 60)
    page.wait(f"{ROWS}.length >= 2", "both requests")
    filter_by(page, "group", "failed")
    page.wait(f"{ROWS}.every(row => row.innerText.includes('engine error'))", "only the failed one")
    filter_by(page, "group", "")
    filter_by(page, "text", "zzz")
    page.wait("!document.querySelector('#requests-empty').hidden", "no request is left")
    assert page.text("#requests-empty") == "No request matches the filter."
    filter_by(page, "text", "stop")
    open_row(page, "stop")
    phases = page.run("[...document.querySelectorAll('.filled')].map(e => e.dataset.phase)")
    assert phases[-1] == "decode"
    assert "prompt token" in page.text("#requests .facts")
    page.run("document.querySelector('#requests [aria-expanded=true]').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#requests .opened') === null", "the row is closed")


def test_a_request_is_looked_into(page: Page) -> None:
    before = page.run(f"{ROWS}.length")
    choose(page, "#model", "fake")
    ask_page(page, "A question !tokens=5")
    answered = wait_answered(page)
    page.wait(f"{ROWS}.length > {before}", "its row")
    open_row(page, "stop")
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


def test_a_request_is_cancelled_from_its_row(page: Page, system: Several) -> None:
    client = ask(system.url, "!tokens=5000 !slow=20", model="fake")
    wait_until_flowing([client])
    open_row(page, "decode")
    page.click("#requests .cancel")
    wait_for([client], 60)
    assert client.error == "request_cancelled"
    page.wait(f"{ROWS}[0].querySelector('.status').innerText === 'request cancelled'", "its end")
    page.wait("document.querySelector('#requests .cancel').hidden", "it has ended")


def test_model_is_loaded_and_unloaded_from_its_card_unless_it_is_in_use(page: Page, system: Several) -> None:
    card = "document.querySelector('#models [data-key=\"small\"]')"
    assert page.run(f"{card}.querySelector('.unload').hidden")
    assert page.run("document.querySelector('#models [data-key=fake] .unload').hidden"), "it is resident"
    page.click("#models .load:not([hidden])")
    page.wait(f"{card}.querySelector('.state').innerText === 'loaded'", "it is loaded")
    client = ask(system.url, "!tokens=5000 !slow=20", model="small")
    wait_until_flowing([client])
    page.click("#models .unload:not([hidden])")
    page.wait("document.querySelector('#models .refused:not(:empty)') !== null", "the reason")
    assert "has requests in flight" in page.run("document.querySelector('.refused:not(:empty)').innerText")
    open_row(page, "decode")
    page.click("#requests .cancel")
    wait_for([client], 60)
    page.wait("document.querySelector('#requests-count').innerText === ''", "no request is active")
    page.click("#models .unload:not([hidden])")
    page.wait(f"{card}.querySelector('.state').innerText === 'unloaded'", "it is unloaded")
    page.wait(
        "document.querySelector('#events').innerText.includes('small stopped')", "its worker has stopped"
    )
    page.wait("document.querySelector('#verdict').innerText.includes('Serving 1 model')", "nothing is wrong")
    assert page.run("document.querySelector('.plot .pause')") is None, "an intended shutdown is no pause"
    eventually(lambda: not system.pids("small"), within_s=60, what="its worker is gone")


def test_a_key_is_asked_for_and_kept_for_this_tab(browser: Browser, tmp_path: Path) -> None:
    with running_system(tmp_path, ["--api-key", KEY]) as system:
        system.start_worker()
        page = browser.open(system.url)
        page.wait("document.querySelector('#key-dialog').open", "it asks")
        assert "YOUR_API_KEY" in page.run("document.querySelector('#connect-snippet').textContent")
        page.type("#key", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-why').innerText.includes('Incorrect')", "it says why")
        page.wait("document.querySelector('#key-dialog').open", "it asks again")
        page.press("Escape")
        page.wait("document.querySelector('#verdict').innerText.includes('Incorrect')", "it gives up")
        ask_page(page, "!tokens=3")
        page.wait("document.querySelector('#key-dialog').open", "it asks before it sends anything")
        page.type("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#model').value === 'fake'", "it is let in")
        refusals = system.http.get("/v1/status", headers={"x-api-key": KEY}).json()["recent"]["refusals"]
        assert [refusal["path"] for refusal in refusals if refusal["status"] == 401] == []
        ask_page(page, "!tokens=3")
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
        page.wait("document.querySelector('#connect-copy').innerText === 'Copied'")
        assert page.run("document.activeElement.id") == "connect-copy"
        shown = page.run("document.querySelector('#connect-snippet').textContent")
        assert page.run("window.copied") == shown.replace("••••••••", KEY)
        assert f"authorization: Bearer {KEY}" in page.run("window.copied")
        page.close()


def test_page_content_does_not_overflow(page: Page, system: Several) -> None:
    page.size(WIDTH, 800)
    page.run("location.hash = 'playground'")
    page.wait("document.querySelector('#prompt').offsetParent !== null")
    choose(page, "#model", "fake")
    ask_page(page, "!tokens=3 " + "long" * 40)
    wait_answered(page)
    assert overflowing(page) == []
    wait_for([ask(system.url, f"{'long ' * 40}!tokens=5", model="fake")], 60)
    page.run("location.hash = 'overview'")
    page.wait(f"document.querySelector('.overview').offsetParent !== null && {ROWS}.length > 0")
    assert overflowing(page) == []
    page.run("document.querySelector('#requests .open').click()")
    page.wait("document.querySelector('#requests .opened') !== null", "a row is open")
    assert overflowing(page) == []


def overflowing(page: Page) -> list[str]:
    assert page.run("document.documentElement.scrollWidth") <= WIDTH
    over = page.run(
        "[...document.querySelectorAll('main *')].filter(e => e.offsetParent && !e.closest('svg, .unseen')"
        f" && e.getBoundingClientRect().right > {WIDTH} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    return list(over)
