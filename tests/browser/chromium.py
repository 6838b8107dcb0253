"""Headless Chromium for tests, driven by one thread by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OWN = Path(__file__).parents[2] / ".venv" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
ON_A_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")

CALL_S_MAX, WAIT_S_MAX, CLOSE_S_MAX = 30.0, 60.0, 10.0
WIDTH, HEIGHT = 1280, 900
"""Of the window, in pixels."""

FLAGS = (
    "--headless=shell",
    "--no-sandbox",  # it shows only our page, and root cannot run it otherwise
    *("--no-zygote", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--disable-background-networking", "--no-first-run", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe"),
)


# The browser expects the protocol's pipes as descriptors 3 and 4.
START = """
import fcntl, os, sys
hears, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(hears, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> Path | None:
    """Return the browser from ROUNDHOUSE_BROWSER, `make browser` or the system, in this order, or None."""
    if named := os.environ.get("ROUNDHOUSE_BROWSER"):
        return Path(named)
    if (OWN / "chromium").exists():
        return OWN / "chromium"
    installed = next((found for name in NAMES if (found := shutil.which(name))), None)
    return Path(installed) if installed else ON_A_MAC if ON_A_MAC.exists() else None


class Failed(AssertionError):
    """Error reported by the browser, or by a script in it."""


class Browser:
    """Browser process. Pages are opened one after another."""

    def __init__(self, program: Path, profile: Path, flags: Sequence[str] = ()) -> None:
        hears, tells = os.pipe()
        self._answers, answers = os.pipe()
        self._calls = tells
        starter = [sys.executable, "-c", START, str(hears), str(answers), str(program)]
        libraries = f"{OWN / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        self._process = subprocess.Popen(
            [*starter, *FLAGS, *flags, f"--user-data-dir={profile}"],
            pass_fds=(hears, answers),
            env=os.environ | ({"LD_LIBRARY_PATH": libraries} if program.parent == OWN else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(hears)
        os.close(answers)
        self._count = 0
        self._read = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result. Raises `Failed`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._calls, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + CALL_S_MAX
        while time.monotonic() < deadline:
            for answer in self._come(deadline - time.monotonic()):
                if answer.get("id") != self._count:
                    self.events.append(answer)
                elif "error" in answer:
                    raise Failed(f"{method}: {answer['error']}")
                else:
                    return dict(answer["result"])
        raise Failed(f"{method}: no answer")

    def _come(self, within_s: float) -> list[dict[str, Any]]:
        if select.select([self._answers], [], [], max(0.0, within_s))[0]:
            came = os.read(self._answers, 1 << 20)
            if not came:
                raise Failed("the browser has ended")
            self._read += came
        *whole, self._read = self._read.split(b"\0")
        return [json.loads(each) for each in whole]

    def open(self, url: str, *, width: int = WIDTH, height: int = HEIGHT, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        page.dark(dark=dark)
        page.go(url)
        return page

    def close(self) -> None:
        with contextlib.suppress(OSError, Failed):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(CLOSE_S_MAX)
        os.close(self._calls)
        os.close(self._answers)


def scheme(*, dark: bool) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}


class Page:
    """Tab of the browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def go(self, url: str) -> None:
        """Load another page in this tab."""
        self._browser.events.clear()
        self.run("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.wait("!window.isOld && document.readyState === 'complete'", "the page")

    def run(self, script: str) -> Any:
        """Evaluate an expression, await it, and return its JSON value. Raises `Failed`."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise Failed(f"{script[:200]}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait(self, script: str, what: str = "", within_s: float = WAIT_S_MAX) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + within_s
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > deadline:
                raise Failed(f"not within {within_s} s: {what or script}\n{self.text('body')[:2000]}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click the centre of an element with the mouse."""
        script = f"document.querySelector({json.dumps(selector)})"
        box = self.run(
            f"(e => (e.scrollIntoView({{block: 'center'}}), e.getBoundingClientRect().toJSON()))({script})"
        )
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a named key: `Enter`, `Tab`."""
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "Escape": 27}
        details = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **details, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **details)

    def size(self, width: int, height: int) -> None:
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, *, dark: bool) -> None:
        self.call("Emulation.setEmulatedMedia", features=[scheme(dark=dark)])

    def picture(self) -> bytes:
        """Return a PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Return all errors of scripts and of the content security policy, without HTTP errors."""
        found = []
        for event in self._browser.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            if event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    found.append(entry["text"])
        return found


@contextlib.contextmanager
def running(*flags: str) -> Iterator[Browser]:
    """Start the browser that `find` returns, with further flags. Raises `FileNotFoundError` if there is
    none."""
    program = find()
    if program is None:
        raise FileNotFoundError("no browser found; run `make browser`")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, Path(profile), flags)
        try:
            yield browser
        finally:
            browser.close()
