"""Time bound of templates: those that do not end are interrupted, others never."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from protocol.errors import Code, RequestError
from tests.factories import request
from tests.worker.folders import copied, failure
from tests.worker.input.prompts.test_format import with_template
from worker.input.prompts import render_bound
from worker.input.prompts.prompt import PromptRules, TextPreparer
from worker.input.prompts.render_bound import RenderTimeout, within
from worker.values import SamplingParams

ENDLESS = """
{%- for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}
{%- endfor %}{% endfor %}{% endfor %}"""
MACRO = """
{%- macro tree(n) %}{% if n %}{{ tree(n - 1) }}{{ tree(n - 1) }}{% endif %}{% endmacro %}{{ tree(80) }}"""
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_bound, "RENDER_S_MAX", SHORT_S)


def spin() -> None:
    while True:
        pass


def test_endless_loop_is_interrupted_when_its_time_is_over_even_if_it_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                spin()

    for render in (spin, stubborn):
        with pytest.raises(RenderTimeout, match=r"longer than 0\.1 s"):
            within(0.1, render)


def test_render_in_time_is_never_interrupted_even_at_the_edge() -> None:
    interrupted = 0
    for number in range(20):
        try:
            within(0.02, partial(time.sleep, 0.002 * number))
        except RenderTimeout:
            interrupted += 1
    assert interrupted < 20
    # An interruption that came too late would be raised here.
    for _ in range(200_000):
        pass
    assert within(SHORT_S, lambda: "text") == "text"


def test_each_thread_is_interrupted_for_its_own_render_only() -> None:
    outcomes: dict[str, str] = {}

    def run(name: str, seconds: float) -> None:
        try:
            until = time.monotonic() + seconds
            within(0.3, lambda: [None for _ in iter(lambda: time.monotonic() < until, False)])
            outcomes[name] = "done"
        except RenderTimeout:
            outcomes[name] = "interrupted"

    threads = [
        threading.Thread(target=run, args=(f"{place} {seconds}", seconds))
        for place in range(3)
        for seconds in (0.001, 30.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = {0.001: "done", 30.0: "interrupted"}
    assert outcomes == {f"{n} {seconds}": expected[seconds] for n in range(3) for seconds in expected}


INTERRUPTED_AND_PROFILED = """
import sys
from worker.input.prompts.render_bound import RenderTimeout, within

def endless():
    while True:
        pass

try:
    within(0.1, endless)
except RenderTimeout:
    sys.setprofile(lambda *event: None)
    (lambda: None)()
    sys.setprofile(None)
    print("went on")
"""


def test_nothing_is_left_of_an_interruption() -> None:
    """CPython 3.11 waited for a withdrawn one for ever at the first call that was profiled."""
    command = [sys.executable, "-c", INTERRUPTED_AND_PROFILED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "went on\n"


def test_model_whose_template_does_not_end_fails_to_load_with_the_reason(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "chat_template.jinja").write_text(MACRO)
    assert "its chat template does not end: it takes longer than" in failure(folder)


def test_template_that_does_not_end_on_some_messages_refuses_these(tmp_path: Path) -> None:
    traps = "{% if messages[0].content == 'trap' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    preparer = TextPreparer(with_template(tmp_path, traps), PromptRules(100, 2048, SamplingParams()))

    def prepare(content: str) -> int:
        asked = request(messages=[{"role": "user", "content": content}])
        return len(preparer.prepare(asked, ()).tokens)

    with pytest.raises(RequestError, match="takes longer than") as caught:
        prepare("trap")
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "messages")
    assert prepare("Hello!") > 0
