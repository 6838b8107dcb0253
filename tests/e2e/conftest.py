"""The OpenAI client of a tested system. Without a browser, the tests of the page are not collected."""

from collections.abc import Iterator

import openai
import pytest

from tests.browser import chromium
from tests.system import System

PAGE = ["test_dashboard.py", "test_overview.py", "test_playground.py"]
collect_ignore = [] if chromium.find() else PAGE


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
