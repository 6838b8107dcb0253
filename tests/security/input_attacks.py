"""Attacks by what a request says: forged URLs, and names with line ends, escapes and paths."""

from __future__ import annotations

import asyncio
from functools import partial

from tests import dialects
from tests.security.attacker import CHAT, AttackRun, for_each, get, post
from tests.security.payloads import HEADERS, NAMES, PATHS, chat, injected_bodies
from tests.security.request_forgery import ASKED_HOSTS, FORGED

BAD_REQUEST = frozenset((400,))
NOT_SERVED = frozenset((400, 404, 405, 413))
ANY = NOT_SERVED | {200, 308}


async def forged_requests(run: AttackRun) -> None:
    """Name images at addresses that only the server can reach, in each dialect."""
    run.images.asked.clear()

    async def forge(url: str) -> None:
        dialect = run.dice.choice(dialects.DIALECTS)
        body = dialects.body_of(dialect, [dialects.linked_image(dialect, url)])
        answer = await run.check_answer(url, post(dialects.PATHS[dialect], body), BAD_REQUEST)
        if answer is not None:
            run.check(f"{url}: the answer has the host's text", b"a secret of this" not in answer.body)

    await for_each(FORGED, forge)
    for (path, host), count in run.images.asked.items():
        wrong = path == "/secret" or host not in ASKED_HOSTS
        run.check(f"{host}{path} was fetched {count} times", not wrong)


async def injections(run: AttackRun) -> None:
    """Send line ends, escapes, paths and templates wherever a request has a name, a path or a header."""
    before = await asyncio.to_thread(_files, run)
    ask = partial(run.check_answer, statuses=ANY)

    async def inject(request: tuple[str, bytes]) -> None:
        answer = await ask(*request)
        if answer is not None:
            run.check(f"{request[0]}: a file was read", b"root:" not in answer.body)

    tools = run.scaled(len(NAMES), least=5)
    bodies = [(f"{path} {body}"[:120], post(path, body)) for path, body in injected_bodies(tools)]
    paths = [(path, get(path)) for path in PATHS]
    headers = [(repr(header), post(CHAT, chat("hi"), header)) for header in HEADERS]
    await for_each([*bodies, *paths, *headers], inject)
    new = await asyncio.to_thread(_files, run) - before
    run.check(f"files were created: {sorted(new)}", not new)


def _files(run: AttackRun) -> set[str]:
    """Return the files in the server's folder whose names come from a request."""
    return {str(path) for path in run.system.folder.rglob("*") if "inject" in path.name.lower()}
