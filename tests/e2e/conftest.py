"""The server that most tests share, SDKs for it, and a browser; tests of the page are skipped without one."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.browser import chromium
from tests.browser.chromium import Browser, Page
from tests.system import System, running_system

PAGE = ["test_dashboard.py", "test_playground.py"]
collect_ignore = [] if chromium.find() else PAGE


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a scripted worker, `fake`, and the embedded model, `pocket`, which no test may end."""
    flags = ["--log-format", "json", "--log-level", "debug"]
    with running_system(tmp_path_factory.mktemp("shared"), flags) as system:
        system.start_worker()
        system.start_worker("--max-running", "32", module="worker")
        system.wait_loaded(2, within_s=300)
        yield system


@pytest.fixture(scope="module")
def system(shared: System) -> System:
    """Return the server of this module's tests. Modules that need other settings define their own."""
    return shared


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def claude(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running() as browser:
        browser.open("data:text/html,started").close()  # then all its processes are there
        yield browser


@pytest.fixture(scope="module")
def tab(browser: Browser, system: System) -> Iterator[Page]:
    tab = browser.open(f"{system.url}/health")
    yield tab
    tab.close()
