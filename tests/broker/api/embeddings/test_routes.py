"""POST /v1/embeddings and /v1/rerank, to a worker and back, with lost workers and refusals."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from broker.api.embeddings import embeddings
from broker.server.offload import LARGE_BODY_BYTES
from protocol.messages import Embed, EmbeddingChunk, Rank
from protocol.types import Capabilities
from tests.broker.application import CHAT, SAID, House
from tests.broker.asgi import Exchange, until
from tests.broker.dispatcher_line import ready
from tests.factories import accepted, encoded, events, finished

EMBEDS = Capabilities(generation=False, embeddings=True)
KEY = "rh-one"
RANKS = Capabilities(generation=False, rerank=True)


def serving(house: House, worker: str, model: str, able: Capabilities, rows: int = 4) -> None:
    house.line.hello(worker, model)
    house.line.say(worker, replace(ready(worker, model, rows), capabilities=able))


def post(house: House, path: str, **body: Any) -> Exchange:
    headers = [(b"authorization", b"Bearer " + KEY.encode())]
    return Exchange(house.app, "POST", path, json.dumps(body).encode(), headers)


def asked(house: House, worker: str) -> list[Embed | Rank]:
    return [m for to, m in house.line.sent if to == worker and isinstance(m, Embed | Rank)]


async def arrived(house: House, worker: str, number: int = 1) -> Embed | Rank:
    await until(lambda: len(asked(house, worker)) >= number)
    return asked(house, worker)[number - 1]


def part(worker: str, id: str, sequence: int, *places: int) -> EmbeddingChunk:
    """Return a chunk in which each text's vector is its index."""
    vectors = struct.pack(f"<{len(places)}f", *places)
    return encoded(sequence, places, vectors, worker, id)


async def compute(house: House, worker: str, *places: int, number: int = 1) -> str:
    """Answer the worker's request `number` with the vectors of its texts, and return its id."""
    request = await arrived(house, worker, number)
    house.line.say(worker, accepted(worker, request.id), part(worker, request.id, 0, *places))
    house.line.say(worker, finished(worker, request.id, prompt=6))
    return request.id


@pytest.fixture
def mixed() -> Iterator[House]:
    """Application with a chat, an embedding and a reranking model, each with a worker."""
    house = House()
    house.line.serving("c", "chat")
    serving(house, "e", "embeds", EMBEDS)
    serving(house, "r", "ranks", RANKS)
    yield house
    house.close()


async def test_vectors_come_back_in_one_document(mixed: House) -> None:
    answer = post(mixed, "/v1/embeddings", model="embeds", input=["a", "b", "c"])
    request = await arrived(mixed, "e")
    mixed.line.say("e", accepted("e", request.id), part("e", request.id, 0, 2, 0))
    mixed.line.say("e", part("e", request.id, 1, 1), finished("e", request.id, prompt=6))
    document = (await answer.end()).json
    assert [entry["embedding"] for entry in document["data"]] == [[0.0], [1.0], [2.0]]
    assert document["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert "x-roundhouse-cache" not in answer.headers
    assert len(mixed.line.dispatcher.flights) == 0


async def test_documents_are_ranked_under_each_of_its_names(mixed: House) -> None:
    for number, path in enumerate(("/v1/rerank", "/rerank", "/v2/rerank"), 1):
        answer = post(mixed, path, model="ranks", query="q", documents=["a", "b"])
        id = await compute(mixed, "r", 0, 1, number=number)
        document = (await answer.end()).json
        assert [result["index"] for result in document["results"]] == [1, 0]
        assert document["id"] == id
    assert {type(request) for request in asked(mixed, "r")} == {Rank}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "vectors of a chat model": (
        "/v1/embeddings", {"model": "chat", "input": "a"}, "does not compute embeddings",
    ),
    "a chat with an embedding one": (
        CHAT, {"model": "embeds", "messages": SAID}, "does not generate text. It is an embedding model",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "why"), REFUSED.values(), ids=REFUSED)
async def test_a_model_is_not_asked_for_what_it_is_not_made_for(
    mixed: House, path: str, body: dict[str, Any], why: str
) -> None:
    answer = post(mixed, path, **body)
    assert await answer.refusal() == (400, "invalid_request", "model")
    assert why in answer.error["message"]
    assert not any(isinstance(message, Embed | Rank) for _, message in mixed.line.sent)


async def test_request_without_model_gets_a_model_for_its_task(mixed: House) -> None:
    vectors = post(mixed, "/v1/embeddings", input="a")
    await compute(mixed, "e", 0)
    assert (await vectors.end()).json["model"] == "embeds"
    ranks = post(mixed, "/v1/rerank", query="q", documents=["a"])
    await compute(mixed, "r", 0)
    assert (await ranks.end()).json["model"] == "ranks"
    chat = mixed.chat()
    await until(lambda: mixed.requests("c"))
    id = mixed.requests("c")[0].id
    mixed.line.say("c", events("c", id, "x"), finished("c", id, 1))
    assert (await chat.end()).json["model"] == "chat"


@pytest.mark.parametrize("size", [1, LARGE_BODY_BYTES])
async def test_a_large_body_is_read_beside_the_loop(
    mixed: House, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    read = embeddings.read

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*given, **named)

    monkeypatch.setattr(embeddings, "read", noted)
    vectors = post(mixed, "/v1/embeddings", model="embeds", input="a" * size)
    await compute(mixed, "e", 0)
    assert (await vectors.end()).status == 200
    assert [thread != threading.get_ident() for thread in threads] == [size > 1]


async def test_a_part_that_was_lost_has_the_rest_sent_again() -> None:
    house = House()
    serving(house, "w", "m", EMBEDS)
    answer = post(house, "/v1/embeddings", input=["a"] * 3)
    request = await arrived(house, "w")
    house.line.say("w", accepted("w", request.id), part("w", request.id, 0, 0))
    house.line.say("w", part("w", request.id, 2, 2))  # after a gap
    again = await arrived(house, "w", 2)
    assert (again.id, again.answered) == (f"{request.id}~2", [0])
    house.line.say("w", accepted("w", again.id), finished("w", again.id, prompt=6))  # without any vectors
    again = await arrived(house, "w", 3)
    house.line.say("w", part("w", again.id, 0, 1, 2), finished("w", again.id, prompt=6))
    assert len((await answer.end()).json["data"]) == 3


async def test_a_full_house_says_so_at_once_and_a_client_who_leaves_makes_room() -> None:
    house = House(waiting_max=0)
    serving(house, "w", "m", EMBEDS, rows=1)
    first = post(house, "/v1/embeddings", input="a")
    request = await arrived(house, "w")
    second = await post(house, "/v1/embeddings", input="a").end()
    assert (second.status, second.error["code"]) == (503, "text_generation_busy")
    assert int(second.headers["retry-after"]) >= 1
    assert second.error["running_ids"] + second.error["waiting_ids"] == [request.id]
    first.leave()
    await first.end()
    assert house.cancels() == [request.id]
    assert len(house.line.dispatcher.flights) == 0
