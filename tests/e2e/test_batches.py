"""Batches over HTTP with the openai and anthropic clients, on the scripted worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Batch
from typer.testing import CliRunner

from deploy.command import cli
from tests.system import System, eventually, running_system

CHAT = "/v1/chat/completions"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("batches")
    with running_system(folder, ["--batch-dir", str(folder / "batches")]) as system:
        system.start_ready_worker()
        yield system


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}


def line(custom_id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def create(client: openai.OpenAI, content: bytes | list[dict[str, Any]], endpoint: Any = CHAT) -> Batch:
    content = content if isinstance(content, bytes) else jsonl(content)
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def over(client: openai.OpenAI, id: str) -> Batch:
    def look() -> Batch | None:
        batch = client.batches.retrieve(id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(look, within_s=WAIT_S, what="the batch is over")


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_of_chats_answers_as_single_requests_do(client: openai.OpenAI) -> None:
    asked = [body(f"Repeat: number {n}") for n in range(20)]
    batch = create(client, [line(f"n{n}", each) for n, each in enumerate(asked)])
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    ended = over(client, batch.id)
    counts: Any = ended.request_counts
    assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 20, 20, 0)
    assert ended.error_file_id is None
    assert ended.usage.output_tokens > 0
    found = results(client, ended.output_file_id)
    assert [each["custom_id"] for each in found] == [f"n{n}" for n in range(20)]
    alone = client.chat.completions.create(**asked[7])
    answer = found[7]["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    endpoint = "/v1/responses"
    short = line("one", {"model": "fake", "input": "hello", "max_output_tokens": 5}, endpoint)
    second = over(client, create(client, [short], endpoint).id)
    (found_response,) = results(client, second.output_file_id)
    assert found_response["response"]["body"]["usage"]
    assert {batch.id, second.id} <= {each.id for each in client.batches.list(limit=1)}


def test_a_request_that_fails_is_in_the_error_file(client: openai.OpenAI) -> None:
    lines = [
        line("good", body("hello")),
        line("bad", body("hello", temperature=9)),
        line("lost", body("x", model="nope")),
    ]
    ended = over(client, create(client, lines).id)
    counts: Any = ended.request_counts
    assert (ended.status, counts.completed, counts.failed) == ("completed", 1, 2)
    assert [each["custom_id"] for each in results(client, ended.output_file_id)] == ["good"]
    bad, lost = results(client, ended.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert (lost["custom_id"], lost["response"]["status_code"]) == ("lost", 404)


def test_a_file_with_faults_fails_with_their_lines(client: openai.OpenAI) -> None:
    lines = [
        line("a", body("hello")),
        line("a", body("hello")),
        line("b", body("hello"), "/v1/completions"),
        line("c", body("hello", stream=True)),
    ]
    ended = over(client, create(client, jsonl(lines) + b"{nonsense\n").id)
    assert ended.status == "failed"
    assert [(each.line, each.code) for each in ended.errors.data or ()] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_url"),
        (4, "invalid_value"),
        (5, "invalid_json_line"),
    ]
    ended = over(client, create(client, jsonl(lines).decode().encode("utf-16")).id)
    assert [each.message for each in ended.errors.data or ()] == [
        "The file cannot be read: it is UTF-16: save it as UTF-8."
    ]


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = jsonl([line("a", body("hello"))])
    expiry: Any = {"anchor": "created_at", "seconds": 7200}
    file = client.files.create(file=("mine.jsonl", content), purpose="batch", expires_after=expiry)
    assert (file.object, file.bytes, file.filename) == ("file", len(content), "mine.jsonl")
    assert (file.purpose, file.expires_at) == ("batch", file.created_at + 7200)
    assert client.files.retrieve(file.id) == file
    assert file in list(client.files.list(purpose="batch"))
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI, system: System) -> None:
    slow = [line(f"n{n}", body("!slow=20 !tokens=500", max_tokens=500)) for n in range(50)]
    batch = create(client, slow)
    eventually(
        lambda: client.batches.retrieve(batch.id).status == "in_progress", within_s=WAIT_S, what="it runs"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batches = system.http.get("/v1/status").json()["batches"]
    assert [each["id"] for each in batches["unfinished"]] in ([batch.id], [])
    assert batches["bytes"] > 0
    assert 'roundhouse_batches{status="' in system.http.get("/metrics").text
    ended = over(client, batch.id)
    assert ended.status == "cancelled"
    assert ended.cancelled_at is not None
    assert client.batches.cancel(batch.id).status == "cancelled"


def ended_of(claude: anthropic.Anthropic, id: str) -> Any:
    def look() -> Any:
        batch = claude.messages.batches.retrieve(id)
        return batch if batch.processing_status == "ended" else None

    return eventually(look, within_s=WAIT_S, what="the batch ends")


def test_anthropics_batches_run_to_their_results_or_are_cancelled(claude: anthropic.Anthropic) -> None:
    asked: Any = [
        {"custom_id": "first", "params": body("Repeat: Quito")},
        {"custom_id": "second", "params": body("x", temperature=7)},
    ]
    batch = claude.messages.batches.create(requests=asked)
    assert batch.type == "message_batch"
    assert batch.request_counts.processing == 2
    ended = ended_of(claude, batch.id)
    assert (ended.request_counts.succeeded, ended.request_counts.errored) == (1, 1)
    first, second = claude.messages.batches.results(batch.id)
    assert first.custom_id == "first"
    assert first.result.type == "succeeded"
    alone = claude.messages.create(**asked[0]["params"])
    assert first.result.message.content == alone.content
    assert second.result.type == "errored"
    assert second.result.error.error.type == "invalid_request_error"
    assert batch.id in [each.id for each in claude.messages.batches.list(limit=1)]
    assert claude.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch.id)
    slow = body("!slow=20 !tokens=500", max_tokens=500)
    asked = [{"custom_id": f"n{n}", "params": slow} for n in range(40)]
    batch = claude.messages.batches.create(requests=asked)
    claude.messages.batches.cancel(batch.id)
    ended_of(claude, batch.id)
    found = list(claude.messages.batches.results(batch.id))
    assert sorted(each.custom_id for each in found) == sorted(each["custom_id"] for each in asked)
    assert {each.result.type for each in found} <= {"canceled", "succeeded"}


def test_a_folder_is_private(system: System) -> None:
    folder = system.folder / "batches"
    modes = {path.stat().st_mode & 0o077 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0}
    assert Path(folder).stat().st_mode & 0o077 == 0


# --- the command -------------------------------------------------------------------------------------


def test_the_command_runs_a_file_in_either_format(system: System, tmp_path: Path) -> None:
    chats, messages = tmp_path / "chats.jsonl", tmp_path / "messages.jsonl"
    chats.write_bytes(jsonl([line(f"n{n}", body("hello")) for n in range(3)]))
    messages.write_bytes(jsonl([{"custom_id": "a", "params": body("x", temperature=7)}]))
    done, failed = [
        CliRunner().invoke(cli.app, ["batch", str(file), "--url", system.url]) for file in (chats, messages)
    ]
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "chats.results.jsonl").read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in lines] == ["n0", "n1", "n2"]
    assert failed.exit_code == 1
    assert "1 of 1 requests failed" in failed.output
    (found,) = (tmp_path / "messages.results.jsonl").read_text().splitlines()
    assert json.loads(found)["result"]["type"] == "errored"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}


def test_file_is_utf8_with_line_feeds_in_every_locale(system: System, tmp_path: Path) -> None:
    texts = ["Repeat: Zürich\u2028日本", "Repeat: one\u2029two\x85three\x0bfour"]
    params = [json.dumps({"custom_id": text, "params": body(text)}, ensure_ascii=False) for text in texts]
    file = tmp_path / "駅.jsonl"
    file.write_bytes("\r\n\n".join(["\ufeff" + params[0], params[1]]).encode())
    _, said = roundhouse_batch(system, file, **ASCII).communicate(timeout=WAIT_S)
    assert "駅.results.jsonl" in said
    found = (tmp_path / "駅.results.jsonl").read_bytes()
    assert [json.loads(each)["custom_id"] for each in found.splitlines()] == texts
    assert found.decode().splitlines() == found.decode().split("\n")[:-1]
    chats = tmp_path / "chats.jsonl"
    chats.write_bytes(b"\xef\xbb\xbf" + jsonl([line("a", body("hello"))]))
    assert "0 of 1 requests failed" in roundhouse_batch(system, chats).communicate(timeout=WAIT_S)[1]
    chats.write_bytes(jsonl([line("a", body("hello"))]).decode().encode("utf-16"))
    assert "it is UTF-16: save it as UTF-8" in roundhouse_batch(system, chats).communicate(timeout=WAIT_S)[1]


def roundhouse_batch(system: System, file: Path, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy", "batch", str(file), "--url", system.url]
    environ = os.environ | variables
    return subprocess.Popen(
        command, env=environ, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, encoding="utf-8"
    )


def test_interrupted_command_resumes_its_batch(system: System, client: openai.OpenAI, tmp_path: Path) -> None:
    file = tmp_path / "slow.jsonl"
    file.write_bytes(jsonl([line(f"n{n}", body("!slow=40 !tokens=20")) for n in range(30)]))
    before = {batch.id for batch in client.batches.list()}
    first = roundhouse_batch(system, file)
    memory = tmp_path / "slow.jsonl.batch"
    eventually(memory.exists, within_s=WAIT_S, what="the batch is created")
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=WAIT_S)
    assert (first.returncode, "Interrupted" in said) == (130, True), said
    second = roundhouse_batch(system, file)
    _, said = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, said
    assert "Going on with batch_" in said
    assert len({batch.id for batch in client.batches.list()} - before) == 1
    assert len((tmp_path / "slow.results.jsonl").read_text().splitlines()) == 30
    assert not memory.exists()
