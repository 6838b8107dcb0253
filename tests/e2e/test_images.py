"""Images and videos in all dialects, with real clients; a scripted worker describes what it received, and
encodes each image once, between other rows' decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import anthropic
import openai
import pytest

from tests import dialects
from tests.dialects import DIALECTS, PATHS, body_of, image, linked_image
from tests.faults.questions import image_url, seeing_body, seen_in
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.hosts import Images, serving_images
from tests.images import MP4, animation, bomb, data_url, noise, picture
from tests.system import System, eventually, running_system

RED, BLUE, GREEN = picture("red"), picture("blue", kind="JPEG"), picture("green", (30, 20), "WEBP")
LARGE = noise((400, 300))
KINDS = {RED: "png", BLUE: "jpeg", GREEN: "webp", LARGE: "png"}
PAGES: dict[str, bytes | str | int | None] = {
    "/red.png": RED,
    "/blue": BLUE,
    "/moved": "/red.png",
    "/inside": "http://127.0.0.1/red.png",
    "/gone": 404,
    "/clip.mp4": MP4,
}
OUTSIDE, UNMAPPED = "93.184.216.34", "93.184.216.35"


ALLOWED = "pictures.test,*.pictures.test,down.test,127.0.0.1"


@pytest.fixture(scope="module")
def host() -> Iterator[Images]:
    with serving_images(PAGES) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, host: Images) -> Iterator[System]:
    """Yield a gateway that fetches from a few hosts, and a worker that accepts images and videos."""
    network: dict[str, object] = {
        "names": {
            "pictures.test": [OUTSIDE],
            "a.pictures.test": [OUTSIDE],
            "down.test": [UNMAPPED],
            "elsewhere.test": [OUTSIDE],
        },
        "addresses": {OUTSIDE: host.port, "127.0.0.1": host.port},
    }
    flags = ["--allow-media-hosts", ALLOWED, "--video-frames-max", "3"]
    with running_system(tmp_path_factory.mktemp("images"), flags, network) as system:
        system.start_ready_worker("--images", "--videos")
        yield system


def told(data: bytes) -> str:
    """Return the scripted worker's word for an image."""
    return f"{KINDS[data]}:{sha256(data).hexdigest()[:8]}"


chat_part, input_part, block = (partial(image, dialect) for dialect in DIALECTS)


@pytest.mark.parametrize("stream", [False, True])
def test_images_arrive_in_order(client: openai.OpenAI, claude: anthropic.Anthropic, stream: bool) -> None:
    images = [GREEN, RED, RED, LARGE]
    for dialect in DIALECTS:
        asking = claude if dialect == "messages" else client
        text = dialects.ask(asking, dialect, "fake", "Say !tokens=8", *images, stream=stream)
        assert text.split()[: len(images)] == [*map(told, images)]
        assert not any(word.startswith(("png:", "jpeg:")) for word in text.split()[len(images) :])


def ask_chat(system: System, content: Any, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    return system.http.post("/v1/chat/completions", json=body)


def seen_by(answer: Any) -> list[str]:
    """Return the words for images at the beginning of the answer."""
    assert answer.status_code == 200, answer.text
    words = answer.json()["choices"][0]["message"]["content"].split()
    return [word for word in words if ":" in word]


def test_images_in_results_and_in_earlier_turns_are_seen_in_their_order(
    system: System, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, chat_part(RED)]},
        {"role": "assistant", "content": "I will look.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [chat_part(BLUE), {"type": "text", "text": "there"}],
        },
        {"role": "user", "content": [chat_part(GREEN)]},
    ]
    expected = [told(RED), told(BLUE), told(GREEN)]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=8)
    assert (answer.choices[0].message.content or "").split()[:3] == expected

    first = client.responses.create(
        model="fake",
        input=[{"role": "user", "content": [input_part(RED)]}],
        max_output_tokens=16,  # type: ignore[list-item, misc]
    )
    outputs: Any = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_part(BLUE)]},
        {"role": "user", "content": [input_part(GREEN)]},
    ]
    second = client.responses.create(
        model="fake", input=outputs, previous_response_id=first.id, max_output_tokens=16
    )
    assert second.output_text.split()[:3] == expected

    results: Any = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, block(RED)]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(BLUE)]}, block(GREEN)],
        },
    ]
    message = claude.messages.create(model="fake", messages=results, max_tokens=8)
    [text] = [block.text for block in message.content if block.type == "text"]
    assert text.split()[:3] == expected


def test_a_video_is_a_file_or_a_list_of_frames(system: System) -> None:
    digest = sha256(MP4).hexdigest()[:8]
    for part in (
        {"type": "video_url", "video_url": {"url": data_url(MP4, "video/mp4")}},
        {"type": "video_url", "video_url": "http://pictures.test/clip.mp4"},
        {"type": "video", "video": data_url(MP4, "video/mp4")},
    ):
        assert seen_by(ask_chat(system, [part, chat_part(RED)])) == [f"mp4:{digest}", told(RED)]
    frames = [data_url(RED), "http://pictures.test/blue"]
    digest = sha256(RED + BLUE).hexdigest()[:8]
    answer = ask_chat(system, [chat_part(GREEN), {"type": "video", "video": frames}, chat_part(RED)])
    assert seen_by(answer) == [told(GREEN), f"png*2:{digest}", told(RED)]


@pytest.mark.parametrize(
    "url",
    ["HTTP://Pictures.Test./red.png", "http://pictures.test:80/moved", "http://a.pictures.test/red.png"],
)
def test_an_image_is_fetched_from_hosts_that_are_allowed(system: System, url: str) -> None:
    assert seen_by(ask_chat(system, [{"type": "image_url", "image_url": url}])) == [told(RED)]
    source = {"type": "image", "source": {"type": "url", "url": url}}
    body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": [source]}]}
    answer = system.http.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"].strip() == told(RED)


def test_url_is_fetched_once_for_a_request_and_tells_its_host_nothing(system: System, host: Images) -> None:
    host.asked.clear()
    url = {"type": "image_url", "image_url": "http://pictures.test/blue"}
    assert seen_by(ask_chat(system, [url, chat_part(RED), url])) == [told(BLUE), told(RED), told(BLUE)]
    assert host.asked == {("/blue", "pictures.test"): 1}
    names = {name.lower() for name in host.headers[-1]}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}


URLS = {
    "a file": "file:///etc/passwd",
    "loopback": "http://127.0.0.1/red.png",
    "a redirect into loopback": "http://pictures.test/inside",
    "a host that is not allowed": "http://elsewhere.test/red.png",
    "an address where nobody is": "http://down.test/red.png",
    "a page that is not there": "http://pictures.test/gone",
    "bad base64": "data:image/png;base64,AA*A",
    "a wrong type": data_url(b"%PDF-1.7 of no image"),
    "half of an image": data_url(LARGE[: len(LARGE) // 2]),
    "a bomb": data_url(bomb()),
    "an animation": data_url(animation("GIF")),
    "too many bytes": data_url(b"\x89PNG\r\n\x1a\n" + bytes(17 * 2**20)),
}
PLACES = {"chat": "messages[0].content[1]", "responses": "input[0].content[1]"}


def ask_badly(system: System, dialect: str, url: str) -> Any:
    """Send an image in a dialect to the scripted model."""
    content = [dialects.text(dialect, "x"), linked_image(dialect, url)]
    return system.http.post(PATHS[dialect], json=body_of(dialect, content, model="fake"))


def check_refusal(answer: Any, dialect: str, code: str = "invalid_media") -> None:
    """Check for a 400 in the format of the dialect that names the image."""
    assert answer.status_code == 400, answer.text
    assert "secret" not in answer.text
    document = answer.json()
    error = document["error"]
    assert error["type"] == "invalid_request_error"
    if dialect == "messages":
        assert document["type"] == "error"
        assert error["message"].startswith("messages[0].content[1]: ")
    else:
        assert (error["code"], error["param"]) == (code, PLACES[dialect])


def test_unreadable_image_is_a_400_with_its_param_and_disturbs_nobody(system: System, host: Images) -> None:
    host.asked.clear()
    texts = [f"!slow=10 number {n} !tokens=300" for n in range(2)]
    streams = [ask(system.url, text) for text in texts]
    wait_until_flowing(streams)
    # Each URL in one dialect, and one of each kind in all.
    asked = [(name, DIALECTS[number % 3]) for number, name in enumerate(URLS)]
    asked += [(name, dialect) for name in ("a bomb", "a redirect into loopback") for dialect in DIALECTS]
    for name, dialect in asked:
        check_refusal(ask_badly(system, dialect, URLS[name]), dialect)
    # Internal hosts received no request.
    assert {named for _, named in host.asked} <= {"pictures.test"}
    wait_for(streams, 60)
    assert [stream.texts for stream in streams] == [[scripted(text, 300)] for text in texts]
    assert all(worker.running for worker in system.workers)
    assert seen_by(ask_chat(system, [chat_part(RED)])) == [told(RED)]
    assert system.http.get("/v1/status").json()["gateway"]["media_bytes"] == 0


def test_more_frames_than_the_line_takes_are_refused(system: System) -> None:
    most = [{"type": "text", "text": "!tokens=64"}, *[chat_part(RED)] * 64]
    assert len(seen_by(ask_chat(system, most, max_tokens=100))) == 64
    answer = ask_chat(system, [chat_part(RED)] * 65)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[64]")
    assert "64" in answer.json()["error"]["message"]


# --- encoding ----------------------------------------------------------------------------------------

LOOK_S = 0.4


def counters(system: System, encoded_min: int = 0) -> dict[str, int]:
    """Return the image counters of the worker, once it is idle and has reported so many encoded images."""

    def told() -> dict[str, Any] | None:
        worker = system.http.get("/v1/status").json()["workers"][-1]
        at_rest = not worker["running"] and not worker["waiting"] and worker["images"]
        return worker["images"] if at_rest and worker["images"]["encoded"] >= encoded_min else None

    return eventually(told, within_s=60, what="images are counted") or {}


def asked(system: System, text: str, *numbers: int) -> Client:
    client = Client(system.url, seeing_body(text, [image_url(number) for number in numbers]))
    client.start()
    return client


def seen(*numbers: int) -> list[str]:
    """Return the scripted worker's words for these images."""
    return [seen_in(image_url(number)) for number in numbers]


def test_an_image_is_encoded_once_for_all_who_ask_about_it(system: System) -> None:
    before = counters(system)
    texts = [f"what is it {'now ' * number}!look=200 !tokens=5" for number in range(8)]
    clients = [asked(system, text, 1) for text in texts]
    wait_for(clients, 60)
    assert [client.texts for client in clients] == [[scripted(text, 5, seen=seen(1))] for text in texts]
    wait_for([again := asked(system, texts[0], 1)], 60)
    assert again.texts == [scripted(texts[0], 5, seen=seen(1))]
    after = counters(system, before["encoded"] + 1)
    assert after["encoded"] - before["encoded"] == 1
    assert 0 < after["bytes"] < after["bytes_max"]


def test_streams_go_on_between_four_images(system: System) -> None:
    stream = ask(system.url, "!tokens=300 !slow=10")
    wait_until_flowing([stream])
    client = asked(system, f"look !look={1000 * LOOK_S} !tokens=3", 2, 3, 4, 5)
    wait_for([client, stream], 60)
    assert client.texts == [scripted("look !look !tokens", 3, seen=seen(2, 3, 4, 5))]
    # Encoding all images without decode steps between them would cause one long pause.
    assert len([end - begin for begin, end in stream.pauses if end - begin > LOOK_S / 2]) >= 4


def test_an_image_that_cannot_be_encoded_fails_its_request_and_nobody_else(system: System) -> None:
    stream = ask(system.url, "!tokens=100 !slow=10")
    wait_until_flowing([stream])
    wait_for([blind := asked(system, "look !blind", 6), stream], 60)
    assert (blind.status, blind.error) == (500, "engine_error")
    assert stream.texts == [scripted("!tokens=100 !slow=10", 100)]
    wait_for([client := asked(system, "look !tokens=3", 6)], 60)
    assert client.texts == [scripted("look !tokens", 3, seen=seen(6))]


def test_clearing_the_cache_forgets_images(system: System) -> None:
    wait_for([asked(system, "look !tokens=3", 7)], 60)
    held = counters(system)["bytes"]
    [freed] = system.http.delete("/v1/cache").json()["data"]
    assert freed["ram_bytes"] >= held > 0
    eventually(lambda: counters(system)["kept"] == 0, within_s=60, what="all encoded images are freed")


def test_image_outlives_its_worker_and_is_not_sent_or_fetched_again(system: System, host: Images) -> None:
    """Must be the last test of the module's system, because it kills the worker."""
    url = "http://pictures.test/red.png"
    parts = [{"type": "text", "text": "!slow=10 !tokens=150"}, chat_part(LARGE)]
    message = {"role": "user", "content": [*parts, {"type": "image_url", "image_url": url}]}
    body: dict[str, object] = {"messages": [message], "stream": True, "n": 2}
    alone = Client(system.url, body)
    alone.run()
    assert [text.split()[:2] for text in alone.texts] == [[told(LARGE), told(RED)]] * 2
    host.asked.clear()
    streams = [Client(system.url, body) for _ in range(4)]
    for stream in streams:
        stream.start()
    wait_until_flowing(streams)
    assert system.http.get("/v1/status").json()["gateway"]["media_bytes"] == len(LARGE) + len(RED)
    system.workers[-1].kill()
    successor = system.start_worker("--images", "--videos")
    wait_for(streams, 60)
    assert [stream.texts for stream in streams] == [alone.texts] * 4
    assert host.asked == {("/red.png", "pictures.test"): 4}
    status = system.http.get("/v1/status").json()["gateway"]
    assert (status["media_bytes"], status["failover"]["resumed"]) == (0, 8)
    successor.stop()
