"""Agents from npm read a file through a tool call and report its content, each over its own API.

It passes if it exits with status 0, prints the password, and received no errors. Needs npm and Node 22."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.agents.profiles import Agent
from tests.conformance.drivers import Environment
from tests.conformance.environments import INSTALLED, make
from tests.system import System, eventually, running_system

ANSWER_S_MAX = 180
LOGGED_S_MAX = 5
ANSWERS_MIN = 2
"""A tool call, and the answer to its result."""

PASSWORD = "heliotrope-42"
FILE = "secret.txt"
TRIED = {
    Agent.OPENCODE: "1.18.33",
    Agent.CODEX: "0.169.0",
    Agent.CLAUDE: "2.1.330",
    Agent.QWEN: "0.24.4",
    Agent.PI: "0.74.2",
}
"""The tested versions, unless `--latest` is given."""

ONCE: dict[Agent, Sequence[str]] = {
    Agent.OPENCODE: ("run",),
    Agent.CODEX: ("exec", "--skip-git-repo-check"),
    Agent.CLAUDE: ("-p",),
    Agent.QWEN: ("-p",),
    Agent.PI: ("-p",),
}
"""Arguments for one non-interactive task without confirmations."""

_ANSWERED = re.compile(r"gateway\s+(\S+?) (\d{3}) ")


@dataclass(frozen=True)
class Outcome:
    """The result of an agent. `status`: None if it had to be killed. `statuses`: of its responses.
    `shown`: its whole output; `said`: its stdout."""

    status: int | None
    statuses: tuple[int, ...]
    said: str
    shown: str

    @property
    def passed(self) -> bool:
        answered = len(self.statuses) >= ANSWERS_MIN and set(self.statuses) == {200}
        return self.status == 0 and PASSWORD in self.said and answered


def install(agent: Agent, version: str) -> Path:
    """Install an agent; return the folder of its program. Raises `NotMade`."""
    packages = (f"{agent.package}@{version}",)
    return (
        make(Environment(f"{agent}-{version}", "javascript", packages), INSTALLED) / "node_modules" / ".bin"
    )


def ask(agent: Agent, programs: Path, system: System) -> Outcome:
    before = len(_statuses(system))
    with tempfile.TemporaryDirectory(prefix="roundhouse-agent-") as name:
        home, project = Path(name) / "home", Path(name) / "project"
        home.mkdir()
        project.mkdir()
        (project / FILE).write_text(f"The password is {PASSWORD}.\n")
        question = f"Read {project / FILE} and tell me the password."
        command = [sys.executable, "-m", "deploy", "launch", agent, "--url", system.url, "--"]
        status, said, shown = _run([*command, *ONCE[agent], question], project, _environment(home, programs))
    # Requests are logged a moment after they end.
    with contextlib.suppress(AssertionError):
        eventually(lambda: len(_statuses(system)) >= before + ANSWERS_MIN, within_s=LOGGED_S_MAX)
    return Outcome(status, tuple(_statuses(system)[before:]), said, shown)


def _run(command: Sequence[str], folder: Path, env: dict[str, str]) -> tuple[int | None, str, str]:
    """Return the exit status (None on timeout), stdout, and the whole output."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as agent:
        try:
            said, complained = agent.communicate(timeout=ANSWER_S_MAX)
            return agent.returncode, said, said + complained
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            said, complained = agent.communicate()
            return None, said, said + complained


def _environment(home: Path, programs: Path) -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    own = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(root)}
    return {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ} | own


def _statuses(system: System) -> list[int]:
    return [int(status) for _, status in _ANSWERED.findall(system.gateway.log())]


def run(agents: Sequence[Agent], *, latest: bool) -> int:
    """Test the agents, print a line for each and the count; return the exit status."""
    passed = 0
    with tempfile.TemporaryDirectory(prefix="rh-") as name, running_system(Path(name)) as system:
        system.start_worker(module="tests.conformance.reader")
        system.wait_ready()
        for agent in agents:
            version = "latest" if latest else TRIED[agent]
            outcome = ask(agent, install(agent, version), system)
            passed += outcome.passed
            verdict = "passed" if outcome.passed else "FAILED"
            print(f"{agent} {version}: {verdict}, answers {list(outcome.statuses)}, status {outcome.status}")
            if not outcome.passed:
                print(outcome.shown)
    print(f"{passed}/{len(agents)}")
    return 0 if passed == len(agents) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("agents", nargs="*", type=Agent, help="default: all")
    parser.add_argument("--latest", action="store_true", help="test the latest versions")
    told = parser.parse_args()
    if shutil.which("npm") is None:
        parser.error("npm is not installed")
    return run(told.agents or list(Agent), latest=told.latest)


if __name__ == "__main__":
    raise SystemExit(main())
