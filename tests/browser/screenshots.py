"""`python -m tests.browser.screenshots`: regenerate the pictures of docs/dashboard.md.

Runs the complete server with its embedded model and a few clients, and kills its worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from PIL import Image

from tests.browser import chromium
from tests.browser.chromium import Page
from tests.browser.playground import ask
from tests.ports import free_port
from tests.system import NO_TLS, Process, eventually, is_ready

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, HEIGHT, PHONE = 1320, 900, (380, 760)
CLIENTS = 5
COLORS = 128
"""Colors of a picture: enough for the page, and the file stays small."""
SEEN_S = 75.0
WORDS = ["steam", "signal", "wagon", "tender", "boiler", "rails", "whistle", "lamp", "water", "bridge"]
TALK = ("Hello", "My name is Brynhild, and I live in Reykjavik.", "Repeat: the slow train is late")
LATE = "What is my name?"


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[httpx.Client]:
    port = free_port()
    words = ["deploy", "serve", "--port", str(port), "--max-running", "8", "--spare", "0"]
    process = Process("serve", words, folder, {"ROUNDHOUSE_RUNTIME_DIR": str(folder)})
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, verify=NO_TLS) as client:
        try:
            eventually(lambda: is_ready(client), within_s=90, what="the model serves")
            yield client
        finally:
            process.stop()


def _ask(client: httpx.Client, number: int, stop: threading.Event) -> None:
    """Hold conversations of growing length, one after another."""
    rng = random.Random(number)
    while not stop.is_set():
        messages = []
        for _ in range(rng.randint(2, 6)):
            text = "Repeat: " + " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": rng.randint(40, 160), "ignore_eos": True}
            told = client.post("/v1/chat/completions", json=body).json()
            if "choices" not in told:  # no worker is available
                break
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
            stop.wait(rng.random() * 2)


def _keep(page: Page, name: str) -> None:
    image = Image.open(io.BytesIO(page.picture())).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)
    print(f"{name}: {(DOCS / name).stat().st_size} bytes")


def _shoot(client: httpx.Client, page: Page, pause: Callable[[float], object]) -> None:
    page.wait("document.querySelector('#model').options.length > 0")
    pause(SEEN_S)
    for number, text in enumerate(TALK, 1):
        ask(page, text)
        page.wait(f"document.querySelectorAll('.turn:not(.going)').length === {2 * number}")
    pause(1.5)
    _keep(page, "dashboard-light.png")
    page.size(*PHONE)
    pause(2)
    _keep(page, "dashboard-narrow.png")
    page.size(WIDTH, HEIGHT)
    page.dark(dark=True)
    [worker] = client.get("/v1/status").json()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    ask(page, LATE)
    page.wait("document.querySelector('.turn:last-child .foot')?.innerText.startsWith('the worker was lost')")
    pause(1)
    _keep(page, "dashboard-dark.png")


def main() -> None:
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, _serving(Path(folder)) as client:
        clients = [threading.Thread(target=_ask, args=(client, n, stop)) for n in range(CLIENTS)]
        for each in clients:
            each.start()
        try:
            with chromium.running() as browser:
                page = browser.open(str(client.base_url), width=WIDTH, height=HEIGHT)
                _shoot(client, page, stop.wait)
        finally:
            stop.set()
            for each in clients:
                each.join()


if __name__ == "__main__":
    main()
