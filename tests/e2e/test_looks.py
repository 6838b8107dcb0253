"""Image encoding with scripted workers: once per image, between other rows' decode steps, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.questions import image_url, seeing_body, seen_in
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import System, eventually, running_system

LOOK_S = 0.4
STEP_MS = 10


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path) as system:
        system.start_worker("--images", "--step-ms", str(STEP_MS))
        system.wait_ready()
        yield system


def images(system: System) -> dict[str, int]:
    """Return the image counters of the idle worker."""

    def told() -> dict[str, Any] | None:
        [worker] = system.http.get("/v1/status").json()["workers"]
        at_rest = not worker["running"] and not worker["waiting"] and worker["images"]
        return worker["images"] if at_rest and worker["images"]["encoded"] else None

    return eventually(told, within_s=10, what="images are counted")


def asked(system: System, text: str, *numbers: int, **fields: object) -> Client:
    client = Client(system.url, seeing_body(text, [image_url(number) for number in numbers], **fields))
    client.start()
    return client


def seen(*numbers: int) -> list[str]:
    """Return the scripted worker's words for these images."""
    return [seen_in(image_url(number)) for number in numbers]


def test_a_question_about_images_is_answered_and_the_next_one_encodes_nothing(system: System) -> None:
    text = "what is it !tokens=5"
    for _ in range(2):
        client = asked(system, text, 1, 2)
        wait_for([client], 30)
        assert client.texts == [scripted(text, 5, seen=seen(1, 2))]
    kept = images(system)
    assert (kept["kept"], kept["encoded"]) == (2, 2)
    assert 0 < kept["bytes"] < kept["bytes_max"]


def test_eight_who_ask_about_a_new_image_at_once_have_it_encoded_once(system: System) -> None:
    texts = [f"what is it {'now ' * number}!look=200 !tokens=5" for number in range(8)]
    clients = [asked(system, text, 7) for text in texts]
    wait_for(clients, 30)
    assert [client.texts for client in clients] == [[scripted(text, 5, seen=seen(7))] for text in texts]
    kept = images(system)
    # Late requests may restore the image from the prefix cache.
    assert kept["encoded"] == 1
    assert kept["hits"] <= 7


def test_streams_go_on_between_four_images(system: System) -> None:
    stream = ask(system.url, "!tokens=300")
    wait_until_flowing([stream])
    client = asked(system, f"look !look={1000 * LOOK_S} !tokens=3", 1, 2, 3, 4)
    wait_for([client, stream], 60)
    assert client.texts == [scripted("look !look !tokens", 3, seen=seen(1, 2, 3, 4))]
    # Encoding all images without decode steps between them would cause one long pause.
    assert len([end - begin for begin, end in stream.pauses if end - begin > LOOK_S / 2]) >= 4


def test_an_image_that_cannot_be_encoded_fails_its_request_and_nobody_else(system: System) -> None:
    stream = ask(system.url, "!tokens=100")
    wait_until_flowing([stream])
    blind = asked(system, "look !blind", 1)
    wait_for([blind, stream], 30)
    assert (blind.status, blind.error) == (500, "engine_error")
    assert stream.texts == [scripted("!tokens=100", 100)]
    client = asked(system, "look !tokens=3", 1)
    wait_for([client], 30)
    assert client.texts == [scripted("look !tokens", 3, seen=seen(1))]


def test_clearing_the_cache_forgets_images(system: System) -> None:
    wait_for([asked(system, "look !tokens=3", 1)], 30)
    held = images(system)["bytes"]
    [freed] = system.http.delete("/v1/cache").json()["data"]
    assert freed["ram_bytes"] >= held > 0
    eventually(lambda: images(system)["kept"] == 0, within_s=5, what="all encoded images are freed")
