"""`python -m tests.browser.screenshots`: the pictures of docs/dashboard.md, anew.

Two scripted workers and a few clients, so that there is something to see; one worker dies on the way.
"""

from __future__ import annotations

import io
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
from PIL import Image

from tests.browser import chromium
from tests.browser.chromium import Page
from tests.system import NO_TLS, System, chat_body, running_system

DOCS = Path(__file__).parents[2] / "docs"
MODELS = ("qwen3-8b", "gemma-3-4b")
CLIENTS = 7
COLORS = 48
"""As many suffice for a page, and make its picture small."""
SEEN_S = 70.0
QUESTION = "When is the !text=wagon, next train? !tokens=400 !think=20 !slow=40"


def _ask(system: System, number: int, stop: threading.Event) -> None:
    rng = random.Random(number)
    with httpx.Client(base_url=system.url, timeout=60, verify=NO_TLS) as client:
        while not stop.is_set():
            words = " ".join(["steam"] * rng.randint(40, 900))
            script = (
                f"!tokens={rng.randint(60, 500)} !slow={rng.choice((15, 25))} !prefill={rng.randint(5, 200)}"
            )
            body = chat_body(f"Client {number % 3} {words} {script}", model=rng.choice(MODELS))
            client.post("/v1/chat/completions", json=body)
            stop.wait(rng.random() * 3)


def _keep(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    small = picture.quantize(COLORS, dither=Image.Dither.NONE)
    small.save(DOCS / name, optimize=True)
    print(f"{name}: {(DOCS / name).stat().st_size} bytes")


def _shoot(system: System, page: Page, pause: Callable[[float], object]) -> None:
    page.wait(f"document.querySelector('#model').options.length === {len(MODELS)}")
    page.run(f"document.querySelector('#model').value = {MODELS[0]!r}")
    pause(SEEN_S)
    page.type("#prompt", QUESTION)
    page.press("Enter")
    page.wait("document.querySelector('.turn:last-child .text').innerText.length > 260")
    _keep(page, "dashboard-light.png")
    page.size(380, 760)
    pause(2)
    _keep(page, "dashboard-narrow.png")
    page.size(1320, 900)
    page.dark(dark=True)
    system.workers[0].kill()
    page.wait("document.querySelector('.turn:last-child .foot').innerText.startsWith('the worker is gone')")
    pause(3)
    _keep(page, "dashboard-dark.png")


def main() -> None:
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, running_system(Path(folder)) as system:
        for name in MODELS:
            system.start_worker("--name", name, "--step-ms", "15", "--max-running", "6")
        system.wait_loaded(len(MODELS))
        clients = [threading.Thread(target=_ask, args=(system, n, stop)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            with chromium.running() as browser:
                _shoot(system, browser.open(system.url, width=1320, height=900), stop.wait)
        finally:
            stop.set()
            system.workers[0].stop()
            system.gateway.kill()


if __name__ == "__main__":
    main()
