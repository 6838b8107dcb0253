"""File of API keys: hashed lines, and changes."""

from __future__ import annotations

import hashlib

import pytest

from protocol.api_keys import HASHED, ApiKey, KeysError, create, parse, plain_keys, without

DIGEST = hashlib.sha256(b"sesame").digest()
LINE = HASHED + DIGEST.hex()


def test_hashed_line_is_the_same_key_as_its_plain_line() -> None:
    assert parse(f"{LINE} ann of accounts".encode(), "keys") == parse(b"sesame ann of accounts", "keys")
    assert parse(LINE.encode(), "keys") == parse(b"sesame", "keys")
    # A client can send plain keys only.
    assert plain_keys(f"# ours\n{LINE} ann\n\nfiled bo\n".encode()) == ["filed"]


def test_limit_is_read_before_the_name() -> None:
    [key] = parse(f"{LINE} max-concurrent=4 ann  b=c".encode(), "keys")
    assert (key.concurrent_max, key.name) == (4, "ann  b=c")
    [nameless] = parse(f"{LINE} max-concurrent=1".encode(), "keys")
    assert (nameless.concurrent_max, nameless.name, nameless.is_named) == (1, "line 1", False)
    # In a plain line everything behind the key was always its name.
    [plain] = parse(b"sesame max-concurrent=4", "keys")
    assert (plain.concurrent_max, plain.name) == (None, "max-concurrent=4")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (HASHED, "64 hexadecimal digits"),
        (LINE + " max-concurrent=0 ann", "with N of at least 1"),
        (LINE + " rpm=5 ann", "the only option is max-concurrent=N"),
        (LINE + "\nsesame", "line 2: duplicate key"),
    ],
)
def test_wrong_hashed_line_is_an_error_and_no_other_key(line: str, complaint: str) -> None:
    with pytest.raises(KeysError, match=complaint) as caught:
        parse(line.encode(), "the file")
    assert str(caught.value).startswith("the file, line ")
    assert DIGEST.hex() not in str(caught.value)


def test_new_keys_are_random_and_found_by_their_line_only() -> None:
    made = [create("ann", count) for count in (None, 3, 3)]
    assert len({text for text, _ in made}) == len(made)
    for text, key in made:
        assert len(text) >= 43
        assert text not in key.line
        assert parse(key.line.encode(), "keys") == (key,)
        assert ApiKey.of(text, "ann", "here").digest == key.digest


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\tb", "x=1 y", "n" * 65, " ann"])
def test_name_that_no_line_can_hold_is_refused(name: str) -> None:
    with pytest.raises(KeysError, match="printable characters"):
        create(name, None)


def test_revocation_leaves_all_other_lines_as_they_are() -> None:
    (_, ann), (_, again), (_, bo) = create("ann", None), create("ann", 2), create("bo", None)
    content = f"# ours\n{ann.line}\n\n  old  carl\n{again.line}\n{bo.line}\n"
    left, removed = without(content.encode(), "ann", "keys")
    assert (left.decode(), removed) == (f"# ours\n\n  old  carl\n{bo.line}\n", [ann, again])
    left, removed = without(content.encode(), again.id, "keys")
    assert (left.decode(), removed) == (content.replace(again.line + "\n", ""), [again])
    left, removed = without(content.encode(), "carl", "keys")
    assert "old" not in left.decode()
    with pytest.raises(KeysError, match="create another one"):
        without(ann.line.encode(), "ann", "keys")
    with pytest.raises(KeysError, match="has no key bo"):
        without(ann.line.encode(), "bo", "keys")
