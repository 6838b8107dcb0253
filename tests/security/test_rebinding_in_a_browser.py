"""DNS rebinding and cross-site requests in a headless browser.

A name that is rebound is simulated by a rule of the browser's resolver: `rebound.example` is this machine, so
that a page of that name at the gateway's port is what the attacker's page is after the name was rebound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.browser import chromium
from tests.browser.chromium import Browser, Page
from tests.hosts import Images, serving_images
from tests.system import System, chat_body, eventually, running_system

REBOUND = "rebound.example"
TYPE = {"content-type": "application/json"}
BODY = json.dumps(chat_body("hello !tokens=1"))
HTML = b"<!doctype html><title>a page</title><body>a page</body>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running(f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1") as browser:
        browser.open("data:text/html,started").close()  # then all its processes are there
        yield browser


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Images]:
    """Serve the page of another origin."""
    with serving_images({"/": HTML}) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("open"), ["--inspect"]) as system:
        system.start_ready_worker()
        yield system


def fetch(page: Page, url: str, **options: object) -> tuple[str, str]:
    """Return the status and the text of a response as the page's script sees them.

    The status is `0` for an opaque response, and `refused` if the browser reveals nothing.
    """
    script = (
        f"fetch({json.dumps(url)}, {json.dumps(options)})"
        ".then(async r => [String(r.status), await r.text()], () => ['refused', ''])"
    )
    status, text = page.run(script)
    return status, text


def requests_seen(system: System) -> int:
    """Return how many requests have reached a worker."""
    return len(system.http.get("/v1/inspect").json()["data"])


def refusals(system: System, code: str) -> int:
    return int(system.http.get("/v1/status").json()["gateway"]["errors"].get(code, 0))


def test_a_rebound_name_reads_changes_and_asks_nothing(browser: Browser, system: System) -> None:
    page = browser.open(f"http://{REBOUND}:{system.port}/v1/models")
    assert page.run("location.hostname") == REBOUND
    before = requests_seen(system)
    attacks = [
        fetch(page, "/v1/status"),
        fetch(page, "/v1/inspect"),
        fetch(page, "/v1/cache", method="DELETE"),
        fetch(page, "/v1/chat/completions", method="POST", headers=TYPE, body=BODY),
    ]
    for status, text in attacks:
        assert (status, json.loads(text)["error"]["code"]) == ("421", "host_not_allowed")
    assert requests_seen(system) == before
    page.close()


def test_page_of_another_origin_asks_nothing(browser: Browser, elsewhere: Images, system: System) -> None:
    page = browser.open(f"http://127.0.0.1:{elsewhere.port}/")
    before, refused = requests_seen(system), refusals(system, "origin_not_allowed")
    chat = f"{system.url}/v1/chat/completions"
    assert fetch(page, chat, method="POST", mode="no-cors", body=BODY)[0] == "0"  # sent as text/plain
    assert fetch(page, chat, method="POST", headers=TYPE, body=BODY)[0] == "refused"
    assert fetch(page, f"{system.url}/v1/cache", method="DELETE")[0] == "refused"
    assert fetch(page, f"{system.url}/v1/status")[0] == "refused"
    assert fetch(page, f"{system.url}/v1/status/stream", mode="no-cors")[0] == "0"
    assert refusals(system, "origin_not_allowed") == refused + 5
    page.run(
        f"(() => {{ const form = Object.assign(document.createElement('form'), {{method: 'post', "
        f"enctype: 'text/plain', action: {json.dumps(chat)}}});"
        f"const field = Object.assign(document.createElement('input'), {{name: {json.dumps(BODY)}}});"
        "form.append(field); document.body.append(form); form.submit(); })()"
    )
    eventually(
        lambda: refusals(system, "origin_not_allowed") == refused + 6, within_s=60, what="the form is refused"
    )
    assert requests_seen(system) == before
    page.close()


def test_a_page_without_an_origin_is_refused(browser: Browser, elsewhere: Images, system: System) -> None:
    page = browser.open(f"http://127.0.0.1:{elsewhere.port}/")
    refused = refusals(system, "origin_not_allowed")
    script = f"fetch('{system.url}/v1/models', {{mode: 'no-cors', method: 'POST', body: '{{}}'}})"
    source = json.dumps(f"<script>{script}</script>")
    page.run(
        "document.body.append(Object.assign(document.createElement('iframe'), "
        f"{{sandbox: 'allow-scripts', srcdoc: {source}}}))"
    )
    eventually(
        lambda: refusals(system, "origin_not_allowed") == refused + 1, within_s=60, what="null is refused"
    )
    assert "the origin `null`" in system.gateway.log()
    page.close()
