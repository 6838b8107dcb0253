"""`encrypted_content`: a thought that a client carries along without reading it, and sends back.

It is no secret from its client, who may have the same text in `content`, and who may claim any thought there:
so it is wrapped, not encrypted, and its digest only tells one of ours from another server's, or from half of
one. There is no key to it: it outlives this gateway, and any other one can read it.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode

_VERSION = b"rh1"
_DIGEST_BYTES = 12


def seal(thought: str) -> str:
    """The thought behind its digest, in letters of base64."""
    text = thought.encode()
    return urlsafe_b64encode(_digest(text) + text).decode()


def unseal(sealed: str) -> str | None:
    """The thought; None for what is none of ours, or was damaged."""
    try:
        raw = urlsafe_b64decode(sealed.encode("ascii"))
        digest, text = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        return text.decode() if digest == _digest(text) else None
    except ValueError:  # letters that are no base64, bytes that are no text
        return None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(_VERSION + text).digest()[:_DIGEST_BYTES]
