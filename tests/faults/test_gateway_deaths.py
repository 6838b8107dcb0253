"""kill -9 of the gateway and its worker: responses in the background end with the undisturbed text."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.faults.event_follower import EventFollower
from tests.faults.questions import image_url
from tests.faults.streams import scripted
from tests.system import System, eventually, running_system

STEP = ("--step-ms", "20", "--images")
TOKENS = 60
PROMPT = f"go !tokens={TOKENS}"


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
        worker = system.start_ready_worker(*STEP, "--max-running", "2")
        undisturbed = [begin(system, input=input) for input in inputs]
        texts = [text_of(ended(system, id)) for id in undisturbed]
        assert texts[0] == texts[2] == scripted(PROMPT, TOKENS)
        ids = [begin(system, input=input) for input in inputs]
        serving, lock = threading.Event(), threading.Lock()
        serving.set()
        follower = EventFollower(system.url, ids[0], serving, lock, on_event=lambda: None)
        follower.start()
        eventually(lambda: len(follower.events) > 20, within_s=60, what="it has followed for a while")
        worker.kill()
        system.restart_gateway()
        system.start_worker(*STEP, "--max-running", "2")
        follower.join()
        assert (follower.wrong, follower.text) == ("", texts[0])
        documents = [ended(system, id) for id in ids]
        assert {document["status"] for document in documents} == {"completed"}
        assert [*map(text_of, documents)] == texts
        system.restart_gateway()
        assert [text_of(ended(system, id)) for id in ids] == texts
        follow = {"model": "fake", "input": "and?", "previous_response_id": ids[0]}
        system.wait_ready()
        assert system.http.post("/v1/responses", json=follow).status_code == 200
