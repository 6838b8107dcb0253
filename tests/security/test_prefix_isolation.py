"""Isolation of API keys in the prefix cache, with a real gateway and a real worker."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.messages import Generate
from tests.broker.application import TEXT, House
from tests.broker.asgi import Exchange, run, until
from tests.e2e.test_keys import bearer, write
from tests.factories import accepted, events, finished
from tests.models.fixtures import model_folder
from tests.system import System, eventually, running_system

ANN, AGAIN, BOB, CAY, NEW = "rh-ann", "rh-ann-too", "rh-bob", "rh-cay", "rh-new"
DIGITS = "0123456789"
BEFORE = "The card ends in 4711 and was issued in Lisbon on the second of May. Its PIN is "
LONG = " ".join(f"line {number} of the contract" for number in range(100))
"""A prompt long enough to be written to disk."""


class Told(NamedTuple):
    """What a client is told of the cache: `cached_tokens`, and the response header."""

    cached: int
    header: str


def ask(system: System, key: str, prompt: str) -> Told:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = system.http.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return Told(usage["prompt_tokens_details"]["cached_tokens"], answer.headers["x-roundhouse-cache"])


def guess_next_digit(system: System, key: str, known: str) -> Sequence[Told]:
    """Return what `key` is told for each digit that may follow `known` in another's prompt."""
    ask(system, key, f"{known}x.")  # so that `known` is cached for all guesses
    return [ask(system, key, f"{known}{digit}.") for digit in DIGITS]


def write_keys(folder: Path, **keys: str) -> None:
    """Replace the key file by one with these keys, by the names of their owners."""
    write(folder / "keys", "".join(f"{key} {name}\n" for name, key in keys.items()))


def files_in(folder: Path) -> list[Path]:
    """Return the files of stored prefixes."""
    return list(folder.rglob("*.prefix.safetensors"))


def start_worker(system: System) -> None:
    system.start_ready_worker("--model", str(model_folder("dense")), module="worker")


def test_a_key_finds_its_own_prefixes_and_never_those_of_another_owner(tmp_path: Path) -> None:
    # Two keys of one owner, whose prefixes are the same.
    write(tmp_path / "keys", f"{ANN} ann\n{AGAIN} ann\n{BOB} bob\n")
    with running_system(tmp_path, ["--api-keys-file", str(tmp_path / "keys")]) as system:
        start_worker(system)
        guess_a_pin(system)
        clear_what_is_shared(system)
        rotate_keys_and_restart(system)


def guess_a_pin(system: System) -> None:
    """Cached tokens reveal the PIN to another key of its owner, and nothing to another owner's."""
    pin = "".join(random.choices(DIGITS[1:], k=3))
    ask(system, ANN, f"{BEFORE}{pin}. Do not pass it on.")
    best = ""
    for place in range(len(pin)):
        told = guess_next_digit(system, BOB, BEFORE + pin[:place])
        assert len(set(told)) == 1, told
        # With another key of its owner the same requests find it: the experiment can tell the difference.
        told = guess_next_digit(system, AGAIN, BEFORE + pin[:place])
        best += DIGITS[told.index(max(told))]
    assert best == pin


def clear_what_is_shared(system: System) -> None:
    text = "All of these words are in the prompts of two keys, and stay there until their owner clears them."
    for key in (ANN, BOB, BOB):
        told = ask(system, key, text)
    assert told.cached > 0
    freed = system.http.delete("/v1/cache", headers=bearer(BOB)).json()["data"]
    assert freed[0]["ram_bytes"] > 0
    assert ask(system, ANN, text).cached == told.cached
    assert ask(system, BOB, text).cached == 0


def rotate_keys_and_restart(system: System) -> None:
    """Prefixes stay with their owner when keys are added and replaced, and the worker restarts."""
    assert ask(system, ANN, LONG).cached == 0
    assert ask(system, BOB, LONG).cached == 0
    # Only what was hit is written, of prompts that are no conversations.
    warm = ask(system, ANN, LONG)
    assert ask(system, BOB, LONG).cached == warm.cached > 512
    disk = system.folder / "prefixes"
    eventually(lambda: files_in(disk), within_s=60, what="prefixes are on disk")
    system.workers[-1].stop()
    start_worker(system)
    write_keys(system.folder, ann=NEW, bob=BOB, cay=CAY)
    assert ask(system, CAY, LONG).cached == 0
    read = ask(system, NEW, LONG)
    assert read.cached == warm.cached
    assert "tier=disk" in read.header
    stored = files_in(disk)
    assert not any(key.encode() in path.read_bytes() for path in stored for key in (ANN, BOB, NEW))
    freed = system.http.delete("/v1/cache", headers=bearer(BOB)).json()["data"]
    assert freed[0]["disk_bytes"] > 0
    eventually(lambda: {*stored} - {*files_in(disk)}, within_s=60, what="files are removed")
    assert ask(system, BOB, LONG).cached == 0
    assert ask(system, NEW, LONG).cached == warm.cached


# --- routing -----------------------------------------------------------------------------------------


async def begin(house: House, key: str, prompt: str) -> tuple[Exchange, str, str]:
    """Send a prompt; return the exchange, the worker that got it, and its id."""

    def sent() -> list[tuple[str, str]]:
        return [(worker, message.id) for worker, message in house.line.sent if isinstance(message, Generate)]

    before, body = len(sent()), json.dumps({"prompt": prompt}).encode()
    answer = Exchange(house.app, "POST", TEXT, body, headers=[(b"x-api-key", key.encode())])
    await until(lambda: len(sent()) > before)
    return answer, *sent()[-1]


async def end(house: House, answer: Exchange, worker: str, id: str) -> str:
    """Let the worker answer; return its name."""
    house.line.say(worker, accepted(worker, id), events(worker, id, "."), finished(worker, id, 1))
    assert (await answer.end()).status == 200
    return worker


@pytest.mark.parametrize("sharing", ["key", "all"])
def test_routing_of_a_prompt_does_not_depend_on_prompts_of_another_key(sharing: str) -> None:
    house = House(api_keys=(ANN, BOB), prefix_sharing=sharing, waiting_max=8)
    for worker in ("first", "second"):
        house.line.serving(worker)

    async def talk() -> None:
        other = await begin(house, ANN, "another prompt")
        idle = await end(house, *await begin(house, ANN, LONG))
        assert await end(house, *other) != idle
        assert await end(house, *await begin(house, ANN, LONG)) == idle
        chosen = await end(house, *await begin(house, BOB, LONG))
        assert (chosen == idle) == (sharing == "all")

    run(talk())
