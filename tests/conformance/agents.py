"""Agents from npm and PyPI do ten steps by tools, each over its own API, and hand one on to others of theirs.

An agent passes if it has done them, exits with status 0, received no errors, and all its tools and texts
reached the worker. What it sent is then recorded, for the tests that replay it. Needs npm, and uv for those
from PyPI; Node comes with the agents."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.dialects.normalize import without_volatile
from deploy.agents.profiles import Agent, Endpoint, Model, anybody
from tests.conformance import programs, recorder
from tests.conformance.drivers import Environment
from tests.conformance.environments import INSTALLED, NotMade, make
from tests.conformance.reader import NAME
from tests.faults.cutting_proxy import cutting
from tests.system import running_system

ANSWER_S_MAX = 180
REQUESTS_MIN = 11
"""Ten steps, and the answer to the last."""

PASSWORD = "heliotrope-42"
LATEST = "latest"
NODE = "node@22.23.3"
HERMES = "hermes"
HERMES_CONFIG = """\
model: {{default: "{model}", provider: custom, base_url: "{url}/v1", context_length: 131072}}
"""
TRIED: dict[str, tuple[str, Sequence[str]]] = {
    Agent.OPENCODE: ("1.18.33", ("run",)),
    Agent.CODEX: ("0.171.0", ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")),
    Agent.CLAUDE: ("2.1.332", ("--allowedTools=Agent,Bash,Grep,Read,ToolSearch,Write", "-p")),
    Agent.QWEN: ("0.24.4", ("--yolo", "-p")),
    Agent.PI: ("1.6.0", ("-p",)),
    HERMES: ("0.19.0", ("chat", "-Q", "--yolo", "--cli", "-q")),
}
"""The tested versions, unless `--latest` is given, and arguments for one non-interactive task without
confirmations."""

OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
"""A proxy that does not exist, so that agents reach nothing but our address."""
TEXTS = ("content", "description", "encrypted_content", "input", "instructions", "output", "system", "text")
_STATUS = re.compile(rb"(?m)^HTTP/1.1 (\d{3})")
Exchanges = Sequence[tuple[bytearray, bytearray]]


@dataclass(frozen=True, slots=True)
class Try:
    """A run of an agent. `model`: as it knows the worker's. `arguments`: further ones of the agent.
    `is_launched`: by `roundhouse launch`, not with nothing but the variables of its API."""

    agent: str
    model: str = NAME
    arguments: Sequence[str] = ()
    is_launched: bool = True


TRIES = {
    **{agent.value: Try(agent) for agent in Agent},
    "claude-alone": Try(Agent.CLAUDE, is_launched=False),
    HERMES: Try(HERMES, is_launched=False),
    "codex-additional-tools": Try(Agent.CODEX, "gpt-5.6-sol"),
    "codex-tool-search": Try(Agent.CODEX, "gpt-5.5"),
    "codex-several-agents": Try(Agent.CODEX, arguments=("--enable", "multi_agent_v2")),
}
"""Codex sends other items for names of models that it knows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a try. `proof`: what its last step wrote. `lost`: what owns
    a text or description that has not reached the worker, by number of requests."""

    status: int | None
    proof: str
    requests: int
    statuses: Counter[int]
    lost: Counter[str]

    @property
    def passed(self) -> bool:
        # Some look for other servers' paths first.
        answered = self.statuses.keys() <= {200, 404} and self.statuses[200] >= self.requests >= REQUESTS_MIN
        return self.status == 0 and self.proof == PASSWORD * 3 and answered and not self.lost


def install(agent: str, version: str) -> Path:
    """Install an agent; return the folder of its program. Raises `NotMade`."""
    if agent == HERMES:
        package = "hermes-agent" if version == LATEST else f"hermes-agent=={version}"
        return make(Environment(f"{agent}-{version}", "python", (package,)), INSTALLED) / "bin"
    packages = (f"{Agent(agent).package}@{version}", NODE)
    environment = Environment(f"{agent}-{version}", "javascript", packages)
    return make(environment, INSTALLED) / "node_modules" / ".bin"


def ask(tried: Try, version: str, programs_at: Path) -> tuple[Outcome, recorder.Recording]:
    """Run an agent; return the outcome and what it sent."""
    with (
        tempfile.TemporaryDirectory(prefix="rh-") as name,
        running_system(Path(name)) as system,
        cutting(system.port) as proxy,
    ):
        worker = system.start_worker("--name", tried.model, module="tests.conformance.reader")
        system.wait_ready()
        home, project = Path(name) / "home", Path(name) / "project"
        home.mkdir()
        project.mkdir()
        (project / "secret.txt").write_text(f"The password is {PASSWORD}.\n")
        url, environment = f"http://127.0.0.1:{proxy.port}", _environment(home, programs_at)
        command = [*TRIED[tried.agent][1], *tried.arguments, f"Do ten steps in {project}."]
        if tried.is_launched:
            command = [sys.executable, "-m", "deploy", "launch", tried.agent, "--url", url, "--", *command]
        else:
            command.insert(0, str(programs_at / tried.agent))
            environment |= anybody(Endpoint(url), Model(tried.model)).variables
            (home / ".hermes").mkdir()
            (home / ".hermes" / "config.yaml").write_text(HERMES_CONFIG.format(url=url, model=tried.model))
        done = programs.run(tried.agent, command, environment, project, ANSWER_S_MAX)
        wrote = project / "done.txt"
        proof = "".join(wrote.read_text().split()) if wrote.exists() else ""
        paths = {name: "/work", str(programs_at.parents[1]): "/agent", platform.release(): "6.12.0"}
        sent = [sent for sent, _ in proxy.exchanges]
        outcome = _outcome(done.status, proof, proxy.exchanges, worker.log().splitlines())
        return outcome, recorder.record(tried.agent, version, sent, paths)


def _environment(home: Path, programs_at: Path) -> dict[str, str]:
    path = os.pathsep.join((str(programs_at), os.environ["PATH"]))
    own = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2]), **OFFLINE}
    return {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ} | own


def _outcome(status: int | None, proof: str, exchanges: Exchanges, prompts: Sequence[str]) -> Outcome:
    asked = [list(_texts(body)) for sent, _ in exchanges for body in _bodies(sent)]
    statuses = Counter(int(code) for _, received in exchanges for code in _STATUS.findall(received))
    lost: Counter[str] = Counter()
    for texts in asked:
        missing = [{owner for owner, text in texts if text not in prompt} for prompt in prompts]
        fewest = min(missing or [{"all"}], key=len)
        lost.update(fewest)
    return Outcome(status, proof, len(asked), statuses, lost)


def _bodies(sent: bytes | bytearray) -> list[Any]:
    """Return the bodies of the requests on a connection, which are JSON objects."""
    pieces = sent.decode().split("\r\n\r\n")
    return [json.JSONDecoder().raw_decode(piece)[0] for piece in pieces if piece.startswith("{")]


def _texts(value: Any, owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield what owns each text within a body, descriptions of tools too, and what of it is not to be
    dropped, as within JSON."""
    if isinstance(value, list):
        for each in value:
            yield from _texts(each, owner)
    elif isinstance(value, dict):
        owner = " ".join(str(value[key]) for key in ("type", "role", "name") if key in value) or owner
        for key, each in value.items():
            if isinstance(each, str) and key in TEXTS:
                yield f"{owner}: {key}", json.dumps(without_volatile(each).strip())[1:-1]
            yield from _texts(each, owner)


def run(names: Sequence[str], *, latest: bool) -> int:
    """Test the agents, print a line for each and the count; return the exit status."""
    passed, lines = 0, []
    for name in names:
        agent = TRIES[name].agent
        version = LATEST if latest else TRIED[agent][0]
        try:
            outcome, recording = ask(TRIES[name], version, install(agent, version))
        except NotMade as error:
            lines.append(f"{name} {version}: FAILED, {error}")
            continue
        if outcome.passed:
            recorder.save(recording, name)
        passed += outcome.passed
        lines.append(f"{name} {version}: {'passed' if outcome.passed else 'FAILED'}, {outcome}")
    print(*lines, f"{passed}/{len(names)}", sep="\n")
    return 0 if passed == len(names) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tries", nargs="*", choices=[*TRIES, []], help="default: all")
    parser.add_argument("--latest", action="store_true", help="test the latest versions")
    told = parser.parse_args()
    return run(told.tries or list(TRIES), latest=told.latest)


if __name__ == "__main__":
    raise SystemExit(main())
