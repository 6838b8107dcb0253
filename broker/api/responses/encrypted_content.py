"""`encrypted_content`: reasoning that a client stores as an opaque string and sends back.

It is not secret from the client, which may have the same text in `content` and may send any reasoning there.
So it is encoded, not encrypted. The digest only distinguishes ours from other servers' and from damaged ones.
There is no key, so it outlives this gateway and every other gateway can read it.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode

_VERSION = b"rh1"
_DIGEST_BYTES = 12
_CIPHERTEXT = re.compile(r"gAAAA[\w+/-]*={0,2}|[\w+/-]{100,}={0,2}", re.ASCII)
"""A Fernet token, as OpenAI's servers send, or any long text in base64."""
UNREADABLE = "[Encrypted content of another server, which cannot be read here.]"


def seal(thought: str) -> str:
    """Encode reasoning with its digest in front, as URL-safe base64."""
    text = thought.encode()
    return urlsafe_b64encode(_digest(text) + text).decode()


def unseal(sealed: str) -> str | None:
    """Decode reasoning. Returns None if it is another server's or damaged."""
    try:
        raw = urlsafe_b64decode(sealed.encode("ascii"))
        digest, text = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        return text.decode() if digest == _digest(text) else None
    except ValueError:  # invalid base64 or UTF-8
        return None


def plain_text(content: str) -> str | None:
    """Return the text of encrypted content, which many servers send as it is. None: another's ciphertext."""
    if (text := unseal(content)) is not None:
        return text
    return None if _CIPHERTEXT.fullmatch(content) else content


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(_VERSION + text).digest()[:_DIGEST_BYTES]
