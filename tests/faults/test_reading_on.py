"""Clients whose connections are cut read on, over a killed worker and a killed gateway."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.streams import joined_text, scripted
from tests.system import NO_TLS, System, chat_body, eventually, running_system

TOKENS, EVENTS = 120, 5
PROMPT = f"!tokens={TOKENS} !slow=20"


def cut_after(system: System, conversation: str, events: int) -> tuple[str, bytes, bytes]:
    """Begin a stream, and cut it within an event. Return its id, the events before, and all bytes."""
    body, read = chat_body(PROMPT, model="fake", stream=True), bytearray()
    headers = {"x-conversation-id": conversation}
    url = f"{system.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, verify=NO_TLS) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw(chunk_size=16):
            read += chunk
            if read.count(b"\n\n") >= events:
                break
    whole = bytes(read[: read.rindex(b"\n\n") + 2])
    assert whole.count(b"data: ") == events
    return str(json.loads(whole.split(b"\n")[0][6:])["id"]), whole, bytes(read)


def read_on(url: str) -> bytes:
    answer = httpx.get(url, timeout=60, verify=NO_TLS)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_streams_that_are_cut_are_read_on_over_dead_workers_and_gateways(tmp_path: Path) -> None:
    with running_system(tmp_path) as system, ThreadPoolExecutor(4) as pool:
        system.start_ready_worker()
        for conversation in ("client", "worker", "gateway"):
            id, first, sent = cut_after(system, conversation, EVENTS)

            def is_under_way(name: str = conversation, nbytes: int = 4 * len(first)) -> bool:
                asked = {"conversation_ids": [name]}
                [stream] = system.http.post("/v1/streams/lookup", json=asked).json()
                assert not stream["is_done"]
                return bool(stream["total_bytes"] > nbytes)

            eventually(is_under_way, within_s=30, what="it goes on without its client")
            if conversation == "worker":
                system.start_worker()
                system.workers[0].kill()
            if conversation == "gateway":
                system.restart_gateway()
            by_id = f"{system.url}/v1/chat/completions/{id}/stream?starting_after={EVENTS}"
            by_byte = f"{system.url}/v1/stream/{conversation}?from={len(sent)}"
            rests = list(pool.map(read_on, (by_id, by_byte, by_id)))
            whole = first + rests[0]
            assert joined_text(whole.decode()) == scripted(PROMPT, TOKENS)
            assert whole.endswith(b"data: [DONE]\n\n")
            assert sent + rests[1] == first + rests[2] == whole
