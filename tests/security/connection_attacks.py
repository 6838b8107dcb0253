"""Attacks on connections: idle ones, streams that are not read, pipelines, half-closes, HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
import resource
import socket

from tests.security.attacker import CHAT, AttackRun, fault_of, get, post
from tests.security.payloads import chat

IDLE_S = 8.0
UNREAD_S = 20.0
PIPELINED = 40
DESCRIPTORS_SPARE = 256


async def idle_connections(run: AttackRun) -> None:
    """Open 1,000 connections that send nothing, and hold them; the limit turns away what is beyond it."""
    count = run.scaled(1000, least=20)
    _allow_descriptors(count + DESCRIPTORS_SPARE)
    opened = []
    for _ in range(count):
        opened.append(await run.send(b""))
    await asyncio.sleep(max(1.0, IDLE_S * run.scale))
    for exchange in opened:
        exchange.leave()


async def unfinished_heads(run: AttackRun) -> None:
    """Open 500 connections that send a head byte by byte, and never end it."""
    _allow_descriptors(500 + DESCRIPTORS_SPARE)
    opened = [
        await run.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ") for _ in range(run.scaled(500, least=10))
    ]
    for _ in range(max(2, round(16 * run.scale))):
        await asyncio.sleep(0.5)
        for exchange in opened:
            exchange.writer.write(b"y")
    for exchange in opened:
        exchange.leave()


async def unread_streams(run: AttackRun) -> None:
    """Start 40 long streams that are never read."""
    fields = {"stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    body = post(CHAT, chat("Write without end.", **fields) | {"max_tokens": 20_000})
    opened = [await run.send(body, own=await _narrow_socket(run)) for _ in range(run.scaled(40, least=2))]
    await asyncio.sleep(max(1.0, UNREAD_S * run.scale))
    for exchange in opened:
        exchange.leave()
    await run.settle()


async def _narrow_socket(run: AttackRun) -> socket.socket:
    """Return a connected socket with a small receive buffer, so that the server's fills up soon."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", run.system.port))
    return own


async def pipelined_requests(run: AttackRun) -> None:
    """Send 40 GETs at once on a connection, several times. All are answered, or the last answer says why not
    and closes."""
    for _ in range(run.scaled(20)):
        exchange = await run.send(get("/v1/models") * PIPELINED)
        run.requests += PIPELINED - 1
        count = 0
        while count < PIPELINED:
            answer = await exchange.answer()
            if answer is None:
                run.wrong.append(f"{count} of {PIPELINED} pipelined requests were answered")
                break
            count += 1
            if fault := fault_of(answer, {200, 400}):
                run.wrong.append(f"pipelined: {fault}")
            if answer.closes:
                break
        exchange.leave()


async def half_closed(run: AttackRun) -> None:
    """Send requests, each followed by the end of the client's side of the connection, which ends it."""
    kinds = {
        "GET": get("/health"),
        "a chat": post(CHAT, chat("hi")),
        "a stream": post(CHAT, chat("Write without end.", stream=True) | {"max_tokens": 20_000}),
        "a refusal": post(CHAT, b"{}"),
        "a large body": post(CHAT, chat("hi", metadata={"x": "y" * 200_000})),
    }
    for _ in range(run.scaled(10)):
        for name, data in kinds.items():
            exchange = await run.send(data)
            exchange.writer.write_eof()
            received = await exchange.rest()
            exchange.leave()
            if received and not received.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ")):
                run.wrong.append(f"{name}, then a half-close: {received[:200]!r}")
    await run.settle()


async def old_clients(run: AttackRun) -> None:
    """Ask for streams and documents over HTTP/1.0, whose clients cannot read chunks."""
    for _ in range(run.scaled(10)):
        for stream in (True, False):
            exchange = await run.send(post(CHAT, chat("hi", stream=stream), version="1.0"))
            if fault := _fault_of_old(await exchange.rest(), stream=stream):
                run.wrong.append(f"HTTP/1.0, stream {stream}: {fault}")
            exchange.leave()


def _fault_of_old(received: bytes, *, stream: bool) -> str | None:
    """Return what is wrong with an answer to an HTTP/1.0 client, read to its end."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        return f"not a 200: {received[:200]!r}"
    if b"transfer-encoding" in head.lower():
        return "its answer is chunked"
    if not stream:
        return None if json.loads(body).get("choices") else f"no document: {body[:200]!r}"
    lines = [line for line in body.split(b"\n") if line and not line.startswith(b":")]
    if not body.endswith(b"data: [DONE]\n\n") or not all(line.startswith(b"data: ") for line in lines):
        return f"not a stream of events: {body[-200:]!r}"
    return None


def _allow_descriptors(count: int) -> None:
    """Raise this process's limit of open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
