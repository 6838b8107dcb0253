"""`roundhouse reload --gateway`: no request fails, every text is undisturbed, and nothing is forgotten."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.faults.serving import Served, serving
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.faults.test_flights import ask_many, assert_undisturbed
from tests.faults.test_gateway_death import Retrying
from tests.system import chat_body, eventually

STEP = "--step-ms 10"
TOKENS = 600
LONG = f"!tokens={TOKENS}"


def reload_gateway(served: Served) -> None:
    done, text = served.reload(gateway=True)
    assert done, text


def wait_for_the_old_gateway(served: Served) -> None:
    eventually(served.has_one_gateway, within_s=60, what="the old gateway has ended")


def test_a_reload_of_the_gateway_costs_16_clients_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        clients = ask_many(served.url, 16, TOKENS)
        wait_until_flowing(clients[::2])
        workers = served.workers("ready")
        reload_gateway(served)
        late = ask(served.url, "!tokens=50")
        wait_for([late], 30)
        assert late.texts == [scripted("!tokens=50", 50)]
        wait_for(clients, 60)
        assert_undisturbed(clients, TOKENS)
        wait_for_the_old_gateway(served)
        assert served.workers("ready") == workers
        reload_gateway(served)  # the successor can be replaced as well
        wait_for_the_old_gateway(served)
        assert len(served.gateway_pids()) == 3
        assert "exited with status 0" in served.process.log()


def test_clients_that_connect_during_reloads_are_all_served(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for _ in range(3):
            clients = [ask(served.url, "!tokens=5") for _ in range(8)]
            reload_gateway(served)
            clients += [ask(served.url, "!tokens=5") for _ in range(8)]
            wait_for(clients, 30)
            assert {tuple(client.texts) for client in clients} == {(scripted("!tokens=5", 5),)}
            wait_for_the_old_gateway(served)


def get_models(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/v1/models")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_an_open_connection_goes_on_with_the_new_gateway(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
        assert get_models(connection) == 200
        port = connection.sock.getsockname()[1]
        reload_gateway(served)
        wait_for_the_old_gateway(served)
        assert get_models(connection) == 200
        assert connection.sock.getsockname()[1] == port
        connection.close()


def test_a_worker_that_dies_meanwhile_costs_a_pause(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        early = ask_many(served.url, 4, TOKENS)
        wait_until_flowing(early[::2])
        reload_gateway(served)
        late = ask_many(served.url, 4, TOKENS)
        wait_until_flowing(late[::2])
        [worker] = served.workers("ready")
        os.kill(worker, signal.SIGKILL)
        wait_for([*early, *late], 90)
        assert_undisturbed(early, TOKENS)
        assert_undisturbed(late, TOKENS)
        wait_for_the_old_gateway(served)


def response_body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "input": LONG, **fields}


def text_of(response: dict[str, object]) -> str:
    output: list[dict[str, list[dict[str, str]]]] = response["output"]  # type: ignore[assignment]
    return output[-1]["content"][0]["text"]


def ended(http_client: httpx.Client, id: str) -> Callable[[], dict[str, object] | None]:
    """Return a check that returns the response once it has ended; no request may be refused for good."""

    def check() -> dict[str, object] | None:
        answer = http_client.get(f"/v1/responses/{id}")
        if answer.status_code == 503:  # an SDK tries again
            return None
        assert answer.status_code == 200, answer.text
        document: dict[str, object] = answer.json()
        return document if document["status"] not in ("queued", "in_progress") else None

    return check


def test_answers_in_the_background_go_on_at_the_new_gateway(tmp_path: Path) -> None:
    with serving(tmp_path, f"{STEP} --max-running 2") as served:
        asked = [served.http.post("/v1/responses", json=response_body(background=True)) for _ in range(4)]
        ids = [answer.json()["id"] for answer in asked]
        eventually(
            lambda: served.http.get(f"/v1/responses/{ids[0]}").json()["status"] == "in_progress",
            within_s=30,
            what="the first one runs",
        )
        reload_gateway(served)
        wait_for_the_old_gateway(served)
        for id in ids:
            response = eventually(ended(served.http, id), within_s=60, what="it ends")
            assert text_of(response) == scripted(LONG, TOKENS)
        next_turn = served.http.post("/v1/responses", json=response_body(previous_response_id=ids[0]))
        assert next_turn.status_code == 200


def test_what_the_old_gateway_stores_is_known_to_the_new_one(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        url = f"{served.url}/v1/responses"
        with httpx.stream("POST", url, json=response_body(stream=True), timeout=60) as answer:
            events = answer.iter_lines()
            id = json.loads(next(line for line in events if line.startswith("data: "))[6:])["response"]["id"]
            reload_gateway(served)
            rest = "\n".join(events)
        assert "response.completed" in rest
        stored = eventually(ended(served.http, id), within_s=30, what="it is stored")
        assert text_of(stored) == scripted(LONG, TOKENS)


def test_a_key_of_the_old_gateway_joins_its_answer_at_the_new_one(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        body = chat_body(LONG, stream=True)
        first = Retrying(served.url, "key", body)
        first.start()
        eventually(lambda: first.has(20), within_s=30, what="it flows")
        reload_gateway(served)
        refused = served.http.post("/v1/chat/completions", json=body, headers={"idempotency-key": "key"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        first.join()
        again = Retrying(served.url, "key", body)
        again.start()
        again.join()
        assert again.read == first.read
        assert first.text == scripted(LONG, TOKENS)


def test_keyed_answers_survive_the_death_of_the_old_gateway_too(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        clients = [Retrying(served.url, f"key-{n}", chat_body(LONG, stream=True)) for n in range(4)]
        for client in clients:
            client.start()
        eventually(lambda: all(client.has(20) for client in clients), within_s=30, what="they flow")
        reload_gateway(served)
        os.kill(served.gateway_pids()[0], signal.SIGKILL)
        for client in clients:
            client.join()
        assert [client.text for client in clients] == [scripted(LONG, TOKENS)] * 4


def test_a_batch_goes_on_and_has_each_result_once(tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions"}
        | {"body": chat_body(f"!tokens=20 number {n}", model="fake")}
        for n in range(60)
    ]
    with serving(tmp_path, f"{STEP} --max-running 4") as served:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", content)})
        order = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
        id = served.http.post("/v1/batches", json=order | {"completion_window": "24h"}).json()["id"]

        def batch() -> dict[str, Any]:
            answer = served.http.get(f"/v1/batches/{id}")
            assert answer.status_code == 200, answer.text
            document: dict[str, Any] = answer.json()
            return document

        eventually(lambda: batch()["request_counts"]["completed"] > 4, within_s=30, what="it runs")
        reload_gateway(served)
        eventually(lambda: batch()["status"] == "completed", within_s=60, what="it is complete")
        output = served.http.get(f"/v1/files/{batch()['output_file_id']}/content").text
        results = [json.loads(line) for line in output.splitlines()]
        assert sorted(result["custom_id"] for result in results) == sorted(f"line-{n}" for n in range(60))
        assert all(result["response"]["status_code"] == 200 for result in results)


def test_a_new_gateway_that_dies_is_replaced_while_the_old_one_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        early = ask_many(served.url, 4, TOKENS)
        wait_until_flowing(early[::2])
        reload_gateway(served)
        os.kill(served.gateway_pids()[-1], signal.SIGKILL)
        eventually(lambda: len(served.gateway_pids()) == 3, within_s=30, what="it is replaced")
        eventually(lambda: served.workers("ready"), within_s=30, what="the worker has greeted it")
        late = ask(served.url, "!tokens=5")
        wait_for([late, *early], 60)
        assert late.texts == [scripted("!tokens=5", 5)]
        assert_undisturbed(early, TOKENS)


def test_a_second_reload_waits_until_the_old_gateway_has_ended(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        clients = ask_many(served.url, 2, TOKENS)
        wait_until_flowing(clients[::2])
        reload_gateway(served)
        done, text = served.reload(gateway=True)
        assert not done
        assert "in progress" in text
        began = time.monotonic()
        served.process.kill(signal.SIGTERM)  # and a stop ends both
        assert served.process.wait() == 0
        assert time.monotonic() - began < 30
        wait_for(clients, 10)
