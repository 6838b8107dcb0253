"""GET / and /page/…: the page's own files, which say nothing of anybody and so need no key.

They are read once and served as they are, without a build step. A browser is told to run, draw and ask for
nothing that is not from here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Of content: scripts and styles are our files, never in the markup, and no text can become markup."""

HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""`no-cache`: kept, and asked about each time, so that an upgrade shows at once."""

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class File:
    """`tag`: another one when the content is."""

    content: bytes
    type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """By the path that each is asked for under."""
    found = {}
    for entry in resources.files(__package__).joinpath("assets").iterdir():
        content = entry.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        path = "/" if entry.name == INDEX else f"/page/{entry.name}"
        found[path] = File(content, TYPES[entry.name.rpartition(".")[2]], tag)
    return found


async def show(request: Request) -> Response:
    """One of the files, or that it is still the one that the browser has."""
    file = files()[request.url.path]
    headers = HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)


PATHS = frozenset(files())
"""What needs no key."""

ROUTES = [Route(path, show) for path in sorted(PATHS)]
