"""Encrypted reasoning that clients send back: only content encrypted by this server is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects.responses.encrypted_content import seal, unseal


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encrypted_content_round_trips(thought: str) -> None:
    assert unseal(seal(thought)) == thought


@given(st.integers(0, 55), st.integers(0, 255))
def test_a_damaged_one_is_none(at: int, byte: int) -> None:
    sealed = bytearray(seal("what was thought of it, in words").encode())
    assert len(sealed) > at
    damaged = bytes(sealed[:at]) + bytes([byte]) + bytes(sealed[at + 1 :])
    read = unseal(damaged.decode("latin-1"))
    assert read is None or damaged == bytes(sealed)


@pytest.mark.parametrize("other", ["", "gAAAAABo", "x" * 400, "駅", "AAAA====", seal("hm")[:-4]])
def test_foreign_encrypted_content_decodes_to_none(other: str) -> None:
    assert unseal(other) is None
