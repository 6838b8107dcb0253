"""/v1/files, /v1/batches and /v1/messages/batches: owners, bounds, bad input and disks that fail."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from broker.api.batches.records import WINDOW_S
from protocol.types import BATCH_PRIORITY
from tests.broker.application import CHAT, House, house_with_worker
from tests.broker.asgi import Exchange, lifespan, until
from tests.factories import accepted, events, finished

BOUNDARY = "xyz"
LINE = {
    "custom_id": "a", "method": "POST", "url": CHAT,
    "body": {"messages": [{"role": "user", "content": "x"}]},
}  # fmt: skip


def house_in(folder: Path, **configured: Any) -> House:
    return house_with_worker(rows=2, batch_dir=folder / "batches", **configured)


def form(content: bytes, *, purpose: str = "batch", end: str = "--") -> bytes:
    part = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = part.format("purpose", "") + purpose + "\r\n" + part.format("file", '; filename="f.jsonl"')
    return head.encode() + content + f"\r\n--{BOUNDARY}{end}\r\n".encode()


def send(
    house: House, path: str, body: bytes = b"", method: str = "POST", key: str = "", **more: str
) -> Exchange:
    kind = f"multipart/form-data; boundary={BOUNDARY}" if path == "/v1/files" else "application/json"
    headers = [(b"content-type", more.get("kind", kind).encode())]
    headers += [(b"x-api-key", key.encode())] if key else []
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)] or [b""]
    return Exchange(house.app, method, path, pieces, headers=headers)


async def uploaded(house: House, content: bytes = b"", key: str = "") -> str:
    exchange = await send(house, "/v1/files", form(content or json.dumps(LINE).encode()), key=key).end()
    assert exchange.status == 200, exchange.body
    return str(exchange.json["id"])


async def created(house: House, file: str, key: str = "") -> Exchange:
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    return await send(house, "/v1/batches", json.dumps(body).encode(), key=key).end()


async def read(house: House, path: str, key: str = "", method: str = "GET") -> Exchange:
    return await send(house, path, method=method, key=key).end()


async def test_files_and_batches_are_those_of_their_key(tmp_path: Path) -> None:
    house = house_in(tmp_path, api_keys=("ann", "bob"))
    async with lifespan(house.app):
        file = await uploaded(house, key="ann")
        batch = (await created(house, file, key="ann")).json["id"]
        body = {"requests": [{"custom_id": "a", "params": {"messages": []}}]}
        asked = await send(house, "/v1/messages/batches", json.dumps(body).encode(), key="ann").end()
        message_batch = asked.json["id"]
        own = [f"/v1/files/{file}", f"/v1/batches/{batch}", f"/v1/messages/batches/{message_batch}"]
        for path in (*own, f"/v1/files/{file}/content", f"/v1/messages/batches/{message_batch}/results"):
            assert (await read(house, path)).status == 401
            assert (await read(house, path, key="bob")).status == 404
        assert (await read(house, f"/v1/batches/{message_batch}", key="ann")).status == 404
        assert (await read(house, f"/v1/files/{file}", "bob", "DELETE")).status == 404
        assert (await read(house, f"/v1/batches/{batch}/cancel", "bob", "POST")).status == 404
        assert (await created(house, file, key="bob")).error["param"] == "input_file_id"
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
            assert (await read(house, path, key="bob")).json["data"] == []
            assert len((await read(house, path, key="ann")).json["data"]) == 1


async def test_a_line_is_sent_with_the_lowest_priority_and_a_seed(tmp_path: Path) -> None:
    house = house_in(tmp_path)
    async with lifespan(house.app):
        batch = (await created(house, await uploaded(house))).json["id"]
        id = await house.arrived()
        [request] = house.requests()
        assert request.priority == BATCH_PRIORITY
        running = (await read(house, f"/v1/batches/{batch}")).json
        assert running["status"] == "in_progress"
        in_use = await read(house, f"/v1/files/{running['input_file_id']}", method="DELETE")
        assert in_use.status == 400
        house.line.say("w", accepted("w", id), events("w", id, "hi"), finished("w", id, 1))
        runner = house.gateway.batches
        assert runner is not None
        await until(lambda: runner.thread.store.batches[batch].is_over)
        ended = (await read(house, f"/v1/batches/{batch}")).json
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 1)
        content = await read(house, f"/v1/files/{ended['output_file_id']}/content")
        answer = json.loads(content.body)["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == "hi"
        assert (await read(house, f"/v1/batches/{batch}/cancel", method="POST")).status == 400


@pytest.mark.parametrize("nulls", [(), ("seed", "stream", "background", "n", "store", "model")])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_line_whose_fields_are_null_has_the_seed_of_one_without_them(
    dialect: str, nulls: tuple[str, ...], tmp_path: Path
) -> None:
    house = house_in(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    body = {"max_tokens": 3, "messages": messages, "model": "org/model"} | dict.fromkeys(nulls)
    async with lifespan(house.app):
        if dialect == "openai":
            line = LINE | {"method": None, "body": body}
            batch = (await created(house, await uploaded(house, json.dumps(line).encode()))).json
        else:
            asked = json.dumps({"requests": [{"custom_id": "a", "params": body}]}).encode()
            batch = (await send(house, "/v1/messages/batches", asked).end()).json
        await house.arrived()
        [request] = house.requests()
        runner = house.gateway.batches
        assert runner is not None
        assert request.sampling.seed == runner.thread.store.batches[batch["id"]].seed_of(1)


async def test_lines_in_flight_take_no_place_from_other_requests(tmp_path: Path) -> None:
    house = house_in(tmp_path, waiting_max=0)
    lines = b"\n".join(json.dumps(LINE | {"custom_id": str(n)}).encode() for n in range(9))
    async with lifespan(house.app):
        await created(house, await uploaded(house, lines))
        await house.arrived(3)  # both rows, and half of that again
        for _ in range(2):
            assert (await house.serve(house.chat(), "hi")).status == 200


async def test_a_batch_whose_window_ends_is_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = house_in(tmp_path)
    runner = house.gateway.batches
    assert runner is not None
    ahead_s = 0.0
    monkeypatch.setattr(runner, "_clock", lambda: time.time() + ahead_s)
    async with lifespan(house.app):
        batch = (await created(house, await uploaded(house))).json["id"]
        await house.arrived()
        ahead_s = WINDOW_S + 1
        runner.wake()
        await until(lambda: runner.thread.store.batches[batch].is_over)
        ended = (await read(house, f"/v1/batches/{batch}")).json
        assert (ended["status"], ended["request_counts"]["failed"]) == ("expired", 1)
        [line] = (await read(house, f"/v1/files/{ended['error_file_id']}/content")).body.splitlines()
        assert json.loads(line)["error"]["code"] == "batch_expired"
        assert house.cancels() == [house.requests()[0].id]


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(b"x", purpose="fine-tune"), None, 400, "purpose"),
        (form(b"x", end=""), None, 400, None),
        (form(b"x").replace(b'name="file"', b'name="other"'), None, 400, "file"),
        (form(b"x"), "application/json", 415, None),
        (form(b"x").replace(b'name="purpose"', b'name="' + b"p" * 5000 + b'"'), None, 400, None),
    ],
    ids=["purpose", "cut off", "no file", "no multipart", "long header"],
)
async def test_a_wrong_form_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, kind: str | None, status: int, param: str | None
) -> None:
    house = house_in(tmp_path)
    async with lifespan(house.app):
        answer = await send(house, "/v1/files", body, **({"kind": kind} if kind else {})).end()
        assert (answer.status, answer.error["param"]) == (status, param)
        assert (await read(house, "/v1/files")).json["data"] == []
    assert [file for _, _, files in os.walk(tmp_path / "batches" / "uploads") for file in files] == []


async def test_a_full_store_is_a_507_for_uploads_alone(tmp_path: Path) -> None:
    house = house_in(tmp_path, batch_storage=1000)
    async with lifespan(house.app):
        refused = await send(house, "/v1/files", form(b"x" * 600)).end()
        assert (refused.status, refused.error["code"]) == (507, "storage_failed")
        assert refused.headers["x-should-retry"] == "false"
        assert (await house.serve(house.chat(), "hi")).status == 200


async def test_a_folder_that_cannot_be_written_is_a_507_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("in the way")
    house = house_in(tmp_path)
    async with lifespan(house.app):
        refused = await send(house, "/v1/files", form(b"x")).end()
        assert (refused.status, refused.error["code"]) == (507, "storage_failed")
        assert str(tmp_path) not in refused.error["message"]
        assert (await house.get("/health").end()).status == 200
