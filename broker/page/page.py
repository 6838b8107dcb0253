"""GET / and /page/…: the page's static files. They contain no user data, so they need no key.

They are read once and served unchanged, without a build step. The content security policy allows the browser
to run, display and request only resources of this server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.common.client_recipes import client_recipes

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
"""Content security policy: scripts and styles are our files, never inline, and text cannot become markup."""

HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""With `no-cache` browsers revalidate their copies on each use, so that an upgrade is visible at once."""

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class File:
    """One static file. `tag`: its ETag, a hash of the content."""

    content: bytes
    type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """Return the files by URL path. The recipes of clients are a module beside them."""
    folder = resources.files(__package__).joinpath("assets")
    contents = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    contents["client_recipes.js"] = b"export default %b;\n" % msgspec.json.encode(client_recipes())
    found = {}
    for name, content in contents.items():
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        path = "/" if name == INDEX else f"/page/{name}"
        found[path] = File(content, TYPES[name.rpartition(".")[2]], tag)
    return found


async def show(request: Request) -> Response:
    """Return one file, or 304 if the browser's copy is current."""
    file = files()[request.url.path]
    headers = HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)


PATHS = frozenset(files())
"""Paths that need no key."""

ROUTES = [Route(path, show) for path in sorted(PATHS)]
