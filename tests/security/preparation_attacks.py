"""Attacks on what happens before the scheduler: parsing, tokenization, grammars and image preprocessing."""

from __future__ import annotations

import asyncio
import json
import time

from tests.images import data_url
from tests.security.attacker import CHAT, AttackRun, for_each, get, post
from tests.security.grammar_bombs import all_bombs
from tests.security.payloads import (
    chat,
    common_words,
    empty_objects,
    image_bombs,
    image_chat,
    long_chat,
    many_tools,
    rgb_png,
    strange_words,
)

MEGABYTE = 10**6
BEYOND_CONTEXT = MEGABYTE
"""The smallest long prompt: beyond the context of the embedded model at any number of bytes per token."""
TOOLS_MIN = 300
"""Their definitions are beyond the context of the embedded model as well."""
LEFT_AFTER_S = 0.8
REFUSAL_S_MAX = 20.0
REFUSED = frozenset((400, 413, 429, 503))
SERVED_OR_REFUSED = REFUSED | {200}


async def _chats_left(run: AttackRun, size: int) -> None:
    """Run two clients, one after the other: admission forgets the first prompt when its client leaves."""
    for words in (common_words, strange_words):
        body = post(CHAT, long_chat(words(run.dice, run.scaled(size, BEYOND_CONTEXT))))
        await run.leave_while_busy(body, LEFT_AFTER_S)


async def longest_chats_left(run: AttackRun) -> None:
    """Send two chat bodies of 27 MB, whose clients leave after 0.8 s."""
    await _chats_left(run, 27 * MEGABYTE)


async def longest_chat(run: AttackRun) -> None:
    """Send a chat body of 30 MB, and wait for its refusal, which must name the context."""
    body = post(CHAT, long_chat(common_words(run.dice, run.scaled(30 * MEGABYTE, BEYOND_CONTEXT))))
    answer = await run.check_answer("a prompt far beyond the context", body, {400})
    if answer is not None and answer.status == 400:
        code = json.loads(answer.body)["error"]["code"]
        run.check(f"the refusal is {code}", code == "context_length_exceeded")


async def many_long_chats_left(run: AttackRun) -> None:
    """Send forty chat bodies of 1 MB, four at a time, whose clients leave at random moments."""
    body = post(CHAT, long_chat(strange_words(run.dice, BEYOND_CONTEXT)))

    async def leave(number: int) -> None:
        await run.leave_after(body, run.dice.uniform(0, 0.3))

    await for_each(range(run.scaled(40, least=2)), leave)


async def large_images(run: AttackRun) -> None:
    """Send two requests of 1.6 MB, each with six images of 8,100² pixels."""
    side = run.scaled(8100, least=200)
    urls = [data_url(await asyncio.to_thread(rgb_png, side, side - number)) for number in range(6)]
    body = post(CHAT, image_chat(*urls))
    asked = [run.check_answer("six large images", body, SERVED_OR_REFUSED) for _ in range(2)]
    await asyncio.gather(*asked)


async def many_tools_required(run: AttackRun) -> None:
    """Require a call of one of 5,000 tools, in two requests at once, as the worker prepares two at a time."""
    body = post(CHAT, many_tools(run.dice, run.scaled(5000, least=TOOLS_MIN)))
    began = time.monotonic()
    await asyncio.gather(*(run.check_answer("5,000 tools", body, SERVED_OR_REFUSED) for _ in range(2)))
    took_s = time.monotonic() - began
    run.check(f"5,000 tools took {took_s:.0f} s (limit {REFUSAL_S_MAX:g})", took_s <= REFUSAL_S_MAX)


async def empty_messages(run: AttackRun) -> None:
    """Send a body of 27 MB of empty objects in place of messages."""
    body = post(CHAT, empty_objects(run.scaled(9 * MEGABYTE, least=1000)))
    await run.check_answer("9 million empty objects", body, REFUSED)


async def cancelled_responses(run: AttackRun) -> None:
    """Cancel or delete responses: long prompts in preparation, and streams that have begun."""
    long = common_words(run.dice, BEYOND_CONTEXT)
    preparing = post("/v1/responses", {"input": long, "max_output_tokens": 16, "stream": True})
    running = {"input": "Count.", "max_output_tokens": 4000, "ignore_eos": True, "stream": True}

    async def cancel(number: int) -> None:
        if run.dice.random() < 0.5:
            await run.leave_after(preparing, run.dice.uniform(0, 0.3))
        else:
            await _cancel(run, post("/v1/responses", running, b"connection: close"))

    await for_each(range(run.scaled(40, least=4)), cancel)
    await run.settle()


async def _cancel(run: AttackRun, data: bytes) -> None:
    """Start a stream, cancel it by its id, and check that it ends."""
    exchange = await run.send(data)
    try:
        async with asyncio.timeout(60):
            received = await exchange.reader.readuntil(b'"id":"resp_')
            received += await exchange.reader.readuntil(b'"')
        id = received.rpartition(b'"id":"')[2].rstrip(b'"').decode()
        path = f"/v1/responses/{id}"
        await run.check_answer("a cancellation", post(f"{path}/cancel", {}), {200})
        delete = get(path).replace(b"GET", b"DELETE", 1)
        await run.check_answer("a deletion", delete, {200, 404})
        rest = await exchange.rest()
        run.check(f"a cancelled stream goes on: {rest[-100:]!r}", len(rest) < 2**20)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        run.wrong.append(f"a response to be cancelled did not begin: {error!r}")
    finally:
        exchange.leave()


async def grammar_bombs(run: AttackRun) -> None:
    """Send schemas, patterns and grammars that are expensive to compile or to enforce.

    One whose masks exceed llguidance's limits is refused while it is enforced, its own request alone.
    """
    run.expected_traceback = "grammar failed"
    bombs = [(name, post(CHAT, chat("Answer.", **fields))) for name, fields in all_bombs()]
    deep = b'{"properties":{"a":' * 20_000 + b"{}" + b"}}" * 20_000
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"guided_json":' + deep + b"}"

    async def drop(bomb: tuple[str, bytes]) -> None:
        await run.check_answer(bomb[0], bomb[1], SERVED_OR_REFUSED)

    await for_each([*bombs, ("schema: 20,000 levels", post(CHAT, body))], drop)


async def damaged_images(run: AttackRun) -> None:
    """Send images that are damaged, or far larger than their files."""
    images = await asyncio.to_thread(image_bombs, run.dice)

    async def drop(image: tuple[str, str]) -> None:
        await run.check_answer(image[0], post(CHAT, image_chat(image[1])), SERVED_OR_REFUSED)

    await for_each([*images.items()], drop)
