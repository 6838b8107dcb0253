"""Small launchd: runs plists as real processes, and answers as `launchctl` does. The environment of a job is
little more than its plist's. Sockets are handed over at the start, not on request."""

from __future__ import annotations

import contextlib
import os
import plistlib
import pwd
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.supervisor.handover import handing_over, listening

END_S_MAX = 30.0
LOOK_S = 0.02


class Agent:
    def __init__(self, plist: dict[str, Any], domain: str, throttle_s: float) -> None:
        assert plist.get("UserName") == (pwd.getpwuid(os.getuid()).pw_name if domain == "system" else None)
        self.plist = plist
        self._domain = domain
        self.pid: int | None = None
        self.starts = 0
        self.last_exit: int | None = None
        self._throttle_s = min(throttle_s, plist["ThrottleInterval"])
        self._sockets = [
            listening(told["SockNodeName"], int(told["SockServiceName"]))
            for told in plist.get("Sockets", {}).values()
        ]
        self._unloaded = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_starting = False
        if plist["RunAtLoad"]:
            self.kickstart()

    def kickstart(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            if self._is_starting or (self.pid is not None and _runs(self.pid)):
                return
            self._thread.join(LOOK_S)
        self._is_starting = True
        self._thread = threading.Thread(target=self._keep_alive, name=self.plist["Label"])
        self._thread.start()

    def _keep_alive(self) -> None:
        while not self._unloaded.is_set():
            started = time.monotonic()
            self._run()
            if (self.last_exit == 0) != self.plist["KeepAlive"]["SuccessfulExit"]:
                return
            self._is_starting = True
            self._unloaded.wait(max(0.0, started + self._throttle_s - time.monotonic()))

    def _run(self) -> None:
        plist = self.plist
        words, numbers = plist["ProgramArguments"], [made.fileno() for made in self._sockets]
        if self._sockets:
            words = handing_over(self._sockets[0], words)
        home = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
        with open(plist["StandardErrorPath"], "ab") as err, open(plist["StandardOutPath"], "ab") as out:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=plist["WorkingDirectory"],
                env=home | plist["EnvironmentVariables"],
                pass_fds=numbers,
                start_new_session=True,
            )
        self.pid, self.starts, self._is_starting = process.pid, self.starts + 1, False
        while process.poll() is None and not self._unloaded.wait(LOOK_S):
            pass
        self._end(process)
        self.pid, self.last_exit = None, process.returncode

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(self.plist["ExitTimeOut"])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def unload(self) -> None:
        self._unloaded.set()
        if self._thread is not None:
            self._thread.join(END_S_MAX)
            assert not self._thread.is_alive()
        for made in self._sockets:
            made.close()

    def describe(self) -> str:
        """Describe the job as `launchctl print` does, with a nested section that has the same keys."""
        lines = [f"{self._domain}/{self.plist['Label']} = {{", "\tactive count = 1"]
        lines += [f"\texit timeout = {self.plist['ExitTimeOut']}"]
        lines += [f"\tstate = {'running' if self.pid else 'not running'}"]
        lines += ["\tendpoints = {", "\t\tpid = 1", "\t\tstate = active", "\t}"]
        lines += [f"\tpid = {self.pid}"] if self.pid else []
        match self.last_exit:
            case None:
                lines += ["\tlast exit code = (never exited)"]
            case code if code < 0:
                lines += [f"\tlast terminating signal = {signal.strsignal(-code)}: {-code}"]
            case code:
                lines += [f"\tlast exit code = {code}"]
        return "\n".join([*lines, "}"])


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not reaped yet does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class Agents:
    """Jobs of one domain. Call it with the arguments of a `launchctl` command."""

    def __init__(self, domain: str = f"gui/{os.getuid()}", throttle_s: float = 0.2) -> None:
        self._domain = domain
        self.loaded: dict[str, Agent] = {}
        self.commands: list[str] = []
        self._throttle_s = throttle_s

    def __call__(self, words: Sequence[str], within_s: float = END_S_MAX) -> subprocess.CompletedProcess[str]:
        assert words[0] == "launchctl"
        verb, target, *rest = words[1:]
        if verb != "print":
            self.commands.append(verb)
        label = target.removeprefix(f"{self._domain}/")
        match verb:
            case "print" if target == self._domain:
                return _done(words, out=f"{self._domain} = {{\n}}")
            case "print" if label in self.loaded:
                return _done(words, out=self.loaded[label].describe())
            case "kill" if (killed := self.loaded[rest[0].removeprefix(f"{self._domain}/")].pid) is not None:
                os.kill(killed, signal.Signals[target])
                return _done(words)
            case "kickstart" if label in self.loaded:
                self.loaded[label].kickstart()
                return _done(words)
            case "bootout" if label in self.loaded:
                self.loaded.pop(label).unload()
                return _done(words)
            case "enable":
                return _done(words)
            case "bootstrap" if target == self._domain:
                return self._bootstrap(words, Path(rest[0]))
        return _done(words, 113, f'Could not find service "{label}" in domain for user gui')

    def _bootstrap(self, words: Sequence[str], path: Path) -> subprocess.CompletedProcess[str]:
        plist = plistlib.loads(path.read_bytes())
        if path.stat().st_mode & 0o022 or plist["Label"] in self.loaded:
            return _done(words, 5, "Bootstrap failed: 5: Input/output error")
        self.loaded[plist["Label"]] = Agent(plist, self._domain, self._throttle_s)
        return _done(words)

    def close(self) -> None:
        while self.loaded:
            self.loaded.popitem()[1].unload()


def _done(
    words: Sequence[str], status: int = 0, err: str = "", out: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(list(words), status, out, err)
