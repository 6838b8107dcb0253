"""Attacks, each on a real server of its own, and what they cost others, who are played by
`tests.security.probe`. The status is 1 if a limit of `tests.security.verdicts` is exceeded, or an answer is
not as promised. `--count` is the size in percent; `--leaving` the number of clients that leave."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from tests.faults.runner import run_program
from tests.images import data_url, picture
from tests.security import connection_attacks, input_attacks, preparation_attacks
from tests.security.attacker import CHAT, AttackRun, attacked, post
from tests.security.leaving_attack import leaving_clients
from tests.security.payloads import chat, image_chat
from tests.security.probe import probing
from tests.security.verdicts import HEADER, Measurement, failures, report

Attack = Callable[[AttackRun], Awaitable[None]]

ATTACKS: dict[str, Attack] = {
    "chats-27mb-left": preparation_attacks.longest_chats_left,
    "chat-30mb": preparation_attacks.longest_chat,
    "chats-1mb-left": preparation_attacks.many_long_chats_left,
    "images-8100": preparation_attacks.large_images,
    "tools-5000": preparation_attacks.many_tools_required,
    "empty-objects": preparation_attacks.empty_messages,
    "cancelled": preparation_attacks.cancelled_responses,
    "grammars": preparation_attacks.grammar_bombs,
    "images-damaged": preparation_attacks.damaged_images,
    "idle": connection_attacks.idle_connections,
    "heads": connection_attacks.unfinished_heads,
    "unread": connection_attacks.unread_streams,
    "pipelined": connection_attacks.pipelined_requests,
    "half-closed": connection_attacks.half_closed,
    "http10": connection_attacks.old_clients,
    "ssrf": input_attacks.forged_requests,
    "injections": input_attacks.injections,
    "leaving": leaving_clients,
}
FULL = 100
AFTER_S = 3.0
"""How long the probe goes on after an attack: work that is left may still hold others up."""
WARM_REQUESTS = 5


async def warm(run: AttackRun) -> None:
    """Let the server import what it needs, so that this does not count as growth."""
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    kinds = (
        chat("hi"),
        chat("hi", stream=True),
        image_chat(data_url(picture("red", (64, 64)))),
        chat("hi", response_format={"type": "json_object"}),
        chat("hi", tools=[tool], tool_choice="required"),
    )
    for body in kinds * WARM_REQUESTS:
        await run.check_answer("a request before the attack", post(CHAT, body), {200})
    await run.settle()
    run.requests = 0


def measure(name: str, attack: Attack, folder: Path, seed: int, scale: float) -> Measurement:
    """Run an attack against a new server, beside a probe."""
    folder.mkdir()
    with attacked(folder) as (system, images):
        run = AttackRun(system, images, random.Random(f"{name} {seed}"), scale)
        asyncio.run(warm(run))
        load, _, _ = os.getloadavg()
        with probing(system.port, run.worker.pid, system.gateway.pid) as probe:
            asyncio.run(_attack_for(attack, run))
            measured = probe.finish()
        run.check_processes()
    worker_bytes = max(0, measured.worker_bytes - run.cached_bytes)
    readings = msgspec.structs.replace(measured, worker_bytes=worker_bytes)
    return Measurement(name, run.requests, readings, run.wrong, load)


async def _attack_for(attack: Attack, run: AttackRun) -> None:
    await attack(run)
    await asyncio.sleep(AFTER_S)


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the attacks one after another, and print a row for each."""
    wrong: list[str] = []
    print(HEADER, flush=True)
    for name in given.attacks or ATTACKS:
        attack = ATTACKS[name]
        if name == "leaving":
            attack = partial(leaving_clients, count=given.leaving)
        measurement = measure(name, attack, folder / name, given.seed, given.count / FULL)
        print(report(measurement), flush=True)
        wrong += failures(measurement)
    return wrong


if __name__ == "__main__":
    options = {
        "--seed": 0,
        "--count": FULL,
        "--leaving": {"type": int, "help": "clients of the attack `leaving`; default: 20,000 at full size"},
        "--attacks": {"nargs": "*", "choices": [*ATTACKS], "default": []},
    }
    run_program(__doc__, check, options)
