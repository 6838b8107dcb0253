"""Agents from npm read a file through a tool call and say what is in it, each over the API that it speaks.

    python -m tests.conformance.agents [--folder FOLDER] [--latest] [opencode codex claude qwen pi]

Each agent is installed into a folder of its own and started by `roundhouse launch`, in an empty home and a
project of one file, against a gateway and a worker that makes the right call (`tests.conformance.reader`).
It passes if it ends with status 0, says the password, and has met no error on the way. Needs npm and Node 22.
"""

from __future__ import annotations

import argparse
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

from deploy.agents.setups import Agent
from tests.system import System, running_system

INSTALL_S_MAX = 600
ANSWER_S_MAX = 180
INSTALLED = Path(".venv") / "conformance"

PASSWORD = "heliotrope-42"
FILE = "secret.txt"
TRIED = {
    Agent.OPENCODE: "1.18.33",
    Agent.CODEX: "0.169.0",
    Agent.CLAUDE: "2.1.330",
    Agent.QWEN: "0.24.4",
    Agent.PI: "0.74.2",
}
"""The versions that are asked for, unless the latest are."""

ONCE: dict[Agent, Sequence[str]] = {
    Agent.OPENCODE: ("run",),
    Agent.CODEX: ("exec", "--skip-git-repo-check"),
    Agent.CLAUDE: ("-p",),
    Agent.QWEN: ("-p",),
    Agent.PI: ("-p",),
}
"""How each is told to do one thing, without asking anybody, and to end."""

_ANSWERED = re.compile(r"gateway\s+(\S+?) (\d{3}) ")


@dataclass(frozen=True)
class Outcome:
    """`status`: None, where it had to be killed. `statuses`: of the answers that it got. `shown`: all that it
    has written, `said` the part of it on its stdout."""

    status: int | None
    statuses: tuple[int, ...]
    said: str
    shown: str

    @property
    def passed(self) -> bool:
        called_and_told = len(self.statuses) >= 2
        return self.status == 0 and PASSWORD in self.said and called_and_told and set(self.statuses) == {200}


def install(agent: Agent, folder: Path, version: str) -> Path:
    """The folder that its program is in. Raises `CalledProcessError`."""
    place = folder.resolve() / f"{agent}-{version}"
    programs = place / "node_modules" / ".bin"
    if not (programs / agent).exists():
        place.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place)]
        command.append(f"{agent.package}@{version}")
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    return programs


def ask(agent: Agent, programs: Path, system: System) -> Outcome:
    """One task, in a home and a project that are there for it alone."""
    before = len(_statuses(system))
    with tempfile.TemporaryDirectory(prefix="roundhouse-agent-") as name:
        home, project = Path(name) / "home", Path(name) / "project"
        home.mkdir()
        project.mkdir()
        (project / FILE).write_text(f"The password is {PASSWORD}.\n")
        question = f"Read {project / FILE} and tell me the password."
        command = [sys.executable, "-m", "deploy", "launch", agent, "--url", system.url, "--"]
        status, said, shown = _run([*command, *ONCE[agent], question], project, _environment(home, programs))
    return Outcome(status, tuple(_statuses(system)[before:]), said, shown)


def _run(command: Sequence[str], folder: Path, env: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit status, None where it did not end; what it said; all that it has written."""
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
    """Of all answers so far, as the gateway has logged them."""
    return [int(status) for _, status in _ANSWERED.findall(system.gateway.log())]


def run(agents: Sequence[Agent], folder: Path, *, latest: bool) -> int:
    """A line for each, and how many have passed. The exit status."""
    passed = 0
    with tempfile.TemporaryDirectory(prefix="rh-") as name, running_system(Path(name)) as system:
        system.start_worker(module="tests.conformance.reader")
        system.wait_ready()
        for agent in agents:
            version = "latest" if latest else TRIED[agent]
            outcome = ask(agent, install(agent, folder, version), system)
            passed += outcome.passed
            verdict = "passed" if outcome.passed else "FAILED"
            print(f"{agent} {version}: {verdict}, answers {list(outcome.statuses)}, status {outcome.status}")
            if not outcome.passed:
                print(outcome.shown)
    print(f"{passed}/{len(agents)}")
    return 0 if passed == len(agents) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("agents", nargs="*", type=Agent, help="all, if none is named")
    parser.add_argument("--folder", type=Path, default=INSTALLED, help="where they are installed")
    parser.add_argument("--latest", action="store_true", help="the latest version of each")
    told = parser.parse_args()
    if shutil.which("npm") is None:
        parser.error("npm is not installed")
    return run(told.agents or list(Agent), told.folder, latest=told.latest)


if __name__ == "__main__":
    raise SystemExit(main())
