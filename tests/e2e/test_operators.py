"""Status, metrics, logs and command-line tools for operators, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from deploy.command import cli
from tests.models.fixtures import model_folder
from tests.ports import free_port
from tests.system import NO_TLS, Process, System, chat_body, eventually
from tests.terminal import Terminal

WAIT_S = 60.0
SECRET = "Brynhild-of-the-secret-prompt"
FAKE, POCKET = "fake", "pocket"


def status(system: System) -> dict[str, Any]:
    document: dict[str, Any] = system.http.get("/v1/status").json()
    return document


def command(*words: str, typed: str = "", env: dict[str, str] | None = None) -> Result:
    """Run `roundhouse words…` without a terminal, in this process."""
    return CliRunner().invoke(cli.app, words, input=typed, env=env)


def test_a_request_is_seen_on_its_way_and_after_its_end(system: System) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = chat_body(f"{SECRET} !tokens=200 !slow=5", model=FAKE, max_tokens=200)
        asked = pool.submit(system.http.post, "/v1/chat/completions", json=body)

        def decoding() -> dict[str, Any] | None:
            found = [each for each in status(system)["requests"] if each["answered"] > 2]
            return found[0] if found else None

        seen = eventually(decoding, within_s=WAIT_S)
        assert (seen["model"], seen["phase"], seen["resumes"], seen["preemptions"]) == (FAKE, "decode", 0, 0)
        assert seen["time_to_first_token_s"] > 0
        assert seen["tokens_per_s"] > 0
        answer = asked.result(WAIT_S)
    ended = eventually(
        lambda: [end for end in status(system)["recent"]["ends"] if end["id"] == answer.json()["id"]],
        within_s=WAIT_S,
    )
    assert (ended[0]["code"], ended[0]["answered"], ended[0]["model"]) == ("length", 200, FAKE)
    assert SECRET not in json.dumps(status(system))


def test_prometheus_finds_what_was_answered(system: System) -> None:
    def tokens() -> float:
        families = text_string_to_metric_families(system.http.get("/metrics").text)
        samples = {(s.name, s.labels.get("model")): s.value for family in families for s in family.samples}
        assert samples["roundhouse_worker_device_bytes", POCKET] > 2**20
        assert samples["process_resident_memory_bytes", None] > 2**20
        return samples.get(("roundhouse_generation_tokens_total", FAKE), 0.0)

    before = tokens()
    system.http.post("/v1/chat/completions", json=chat_body("!tokens=9", model=FAKE, max_tokens=7))
    assert tokens() - before == 7


def test_a_request_is_found_in_the_log_by_either_of_its_ids_and_its_prompt_is_not(system: System) -> None:
    body = chat_body(f"{SECRET} !tokens=3", model=FAKE)
    answer = system.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    refused = system.http.post("/v1/chat/completions", json=chat_body(SECRET, model="nobody"))
    assert refused.status_code == 404
    id = answer.json()["id"]

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in system.gateway.log().splitlines()]
        return [line for line in found if line.get("id") == id]

    [end] = eventually(lines, within_s=WAIT_S)
    assert (end["request_id"], end["status"], end["code"]) == ("mine-1", 200, "stop")
    assert end["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    for process in (system.gateway, *system.workers):
        assert SECRET not in process.log(), process.name


def test_the_status_is_a_table_where_it_is_piped(system: System) -> None:
    told = command("status", "--url", system.url)
    assert told.exit_code == 0, told.output
    assert {line.split()[0] for line in told.stdout.splitlines() if line} >= {FAKE, POCKET, "model"}
    document = json.loads(command("status", "--url", f"{system.url}/v1", "--json").stdout)
    assert {worker["model"] for worker in document["workers"]} == {FAKE, POCKET}


def test_a_question_by_a_pipe_is_answered_and_nothing_else_is_printed(system: System) -> None:
    words = "-m", "deploy", "chat", "--url", system.url, "--model", FAKE
    typed = "anything !tokens=4 !text=hum·"
    asked = subprocess.run([sys.executable, *words], input=typed, capture_output=True, text=True, timeout=60)
    assert (asked.returncode, asked.stdout) == (0, "hum·" * 4 + "\n"), asked.stderr


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Yield a function that runs `roundhouse words…` in a terminal; the commands end with the test."""
    env = {"XDG_STATE_HOME": str(tmp_path)}
    opened: list[Terminal] = []

    def open(*words: str) -> Terminal:
        opened.append(Terminal([sys.executable, "-m", "deploy", *words], env))
        return opened[-1]

    yield open
    for terminal in opened:
        terminal.kill()


def test_a_conversation_at_a_terminal_remembers_what_was_said(
    system: System, open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = open_terminal("chat", "--url", system.url, "--model", POCKET)
    terminal.wait(">>> ")
    terminal.type("My name is Brynhild.\n")
    terminal.wait(">>> ")
    terminal.type("What is my name?\n")
    terminal.wait("Your name is Brynhild")
    terminal.wait(" tokens/s, first token after ")
    terminal.wait(">>> ")
    terminal.type("/nothing\n")
    terminal.wait("/help lists commands")
    terminal.type("/exit\n")
    assert terminal.end() == 0
    history = tmp_path / "roundhouse" / "chat_history"
    assert "What is my name?" in history.read_text()


def test_ctrl_c_ends_an_answer_and_not_the_conversation_and_ends_the_status(
    system: System, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("chat", "--url", system.url, "--model", FAKE, "--no-history")
    terminal.wait(">>> ")
    terminal.type("!tokens=4000 !slow=20 !text=hum·\n")
    terminal.wait("hum·hum·hum")
    terminal.type("\x03")
    terminal.wait("stopped")
    eventually(lambda: not status(system)["requests"], within_s=WAIT_S)
    terminal.wait(">>> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    watching = open_terminal("status", "--url", system.url, "--every", "0.1")
    watching.wait("roundhouse ")
    watching.wait("roundhouse ")
    watching.type("\x03")
    assert watching.end() == 0


def test_an_endpoint_is_measured(system: System, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    told = command(
        "bench", system.url, "--model", FAKE, "--concurrency", "3", "--requests", "3", "--rounds", "1",
        "--prompt-tokens", "40", "--answer-tokens", "8", "--compare", system.url, "--compare-model", POCKET,
        "--json", str(written),
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "times the tok/s of" in told.stdout
    [load] = json.loads(written.read_text())["loads"]
    assert load["concurrency"] == 3
    for [round] in load["sides"].values():
        assert (round["requests"], round["errors"], round["tokens"]) == (3, {}, 24)
        assert 30 <= round["prompt_tokens"] / 3 <= 50


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chat", "--url", "SERVER", "--model", "pocke", "hello"], "did you mean pocket?"),
        (["chat", "--url", "SERVER", "--model", FAKE, "!bad=1"], "The request could not be prepared"),
        (["serve", "--port", "PORT"], "is in use by another Roundhouse"),
    ],
    ids=["an unknown model", "a refusal", "a port that is taken"],
)
def test_error_is_one_line(words: list[str], told: str, system: System, tmp_path: Path) -> None:
    given = {"SERVER": system.url, "PORT": str(system.port)}
    done = command(*(given.get(word, word) for word in words), env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.exit_code == 78
    [line] = done.stderr.splitlines()
    assert told in line


def test_serve_says_how_to_try_it_and_its_status_why_a_worker_was_started_again(tmp_path: Path) -> None:
    port = free_port()
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    flags = [f"--model={model_folder('dense')}", "--spare=0", "--port", str(port)]
    serve = Process("serve", ["deploy", "serve", *flags], tmp_path, env)
    try:
        eventually(lambda: "/v1; try: curl" in serve.log(), within_s=WAIT_S, what=serve.log())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS) as http:
            [worker] = http.get("/v1/status").json()["workers"]
            os.kill(worker["pid"], signal.SIGKILL)

            def restarted() -> dict[str, Any] | None:
                told = http.get("/v1/status").json()
                back = [each for each in told["workers"] if each["incarnation"] != worker["incarnation"]]
                return dict(told["models"][0]) if back else None

            model = eventually(restarted, within_s=WAIT_S)
        assert model["restarts"] == 1
        assert "was killed by SIGKILL" in model["last_end"]
        assert model["last_end_reason"] == "sigkill"
    finally:
        serve.stop()
    assert "all stopped, exit status 0" in serve.log()
    assert "connection to the gateway lost" not in serve.log()
