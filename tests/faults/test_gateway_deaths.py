"""kill -9 of the gateway, and of its worker: durable answers end with the text of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.questions import image_url
from tests.faults.retrying import RetryingClient
from tests.faults.streams import scripted
from tests.system import System, eventually, running_system

STEP = ("--step-ms", "20", "--images")
TOKENS = 60
PROMPT = f"go !tokens={TOKENS}"


def events(
    system: System, id: str, *, after: int | None = None, until: int | None = None
) -> list[dict[str, Any]]:
    """Read the events of a response in the background, without keepalives; `until`: up to that number."""
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    found: list[dict[str, Any]] = []
    with system.http.stream("GET", f"/v1/responses/{id}", params=query) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if not found or event["sequence_number"] > found[-1]["sequence_number"]:
                found.append(event)
            if until is not None and found[-1]["sequence_number"] >= until:
                break
    return found


def begin(system: System, **fields: Any) -> str:
    body = {"model": "fake", "background": True, **fields}
    return str(system.http.post("/v1/responses", json=body).raise_for_status().json()["id"])


def ended(system: System, id: str) -> dict[str, Any]:
    """Wait for the end of a response in the background."""
    document: dict[str, Any] = {}

    def is_over() -> bool:
        document.update(system.http.get(f"/v1/responses/{id}").raise_for_status().json())
        return document["status"] not in ("queued", "in_progress")

    eventually(is_over, within_s=60)
    return document


def text_of(document: dict[str, Any]) -> str:
    return str(document["output"][0]["content"][0]["text"])


def test_responses_in_the_background_go_on_with_their_media_and_event_numbers(tmp_path: Path) -> None:
    media = [{"type": "input_text", "text": PROMPT}, {"type": "input_image", "image_url": image_url(1)}]
    inputs = [PROMPT, [{"role": "user", "content": media}], PROMPT]
    with running_system(tmp_path) as system:
        worker = system.start_worker(*STEP, "--max-running", "2")
        system.wait_ready()
        undisturbed = [begin(system, input=input) for input in inputs]
        texts = [text_of(ended(system, id)) for id in undisturbed]
        assert texts[0] == texts[2] == scripted(PROMPT, TOKENS)
        for with_worker in (False, True):
            system.wait_ready()
            ids = [begin(system, input=input) for input in inputs]
            told = events(system, ids[0], until=20)
            if with_worker:
                worker.kill()
            system.restart_gateway()
            if with_worker:
                system.start_worker(*STEP, "--max-running", "2")
            told += events(system, ids[0], after=20)
            assert [event["sequence_number"] for event in told] == list(range(len(told)))
            deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == texts[0]
            documents = [ended(system, id) for id in ids]
            assert {document["status"] for document in documents} == {"completed"}
            assert [*map(text_of, documents)] == texts
        system.restart_gateway()
        assert [text_of(ended(system, id)) for id in ids] == texts
        follow = {"model": "fake", "input": "and?", "previous_response_id": ids[0]}
        system.wait_ready()
        assert system.http.post("/v1/responses", json=follow).status_code == 200


def test_an_answer_is_computed_once_for_a_client_that_comes_back_to_the_next_gateway(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker(*STEP)
        system.wait_ready()
        clients = [
            RetryingClient(system.url, dialect, PROMPT, dialect, stream=stream)
            for dialect, stream in (("chat", True), ("messages", False))
        ]
        for client in clients:
            client.start()
        eventually(lambda: len(clients[0].read) > 1500, within_s=20)
        system.restart_gateway()
        for client in clients:
            client.join()
            assert (client.wrong, client.text) == ("", scripted(PROMPT, TOKENS))
        beginning = clients[0].beginnings[0]
        assert bytes(clients[0].read).startswith(beginning[: beginning.rindex(b"\n\n")])
        told = system.http.get("/v1/status").json()
        assert told["gateway"]["failover"]["restored"] == 2
        assert told["durable"]["journal"]["problem"] == ""
