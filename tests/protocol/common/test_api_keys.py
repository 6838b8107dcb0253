"""File of API keys: its lines, their errors and namespaces, and changes."""

from __future__ import annotations

import hashlib
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.middleware.auth import ApiKeys
from protocol.common.api_keys import HASHED, ApiKey, KeysError, create, parse, plain_keys, without

GOOD, OTHER = "rh-0123456789abcdef", "rh-fedcba9876543210"
DIGEST = hashlib.sha256(b"sesame").digest()
LINE = HASHED + DIGEST.hex()


def test_each_line_is_a_key_and_perhaps_a_name_and_a_hashed_one_the_same_as_its_plain_line() -> None:
    found = parse(f"# who may ask\n\n{GOOD} ann of accounts\r\n  {OTHER}\t\n".encode(), "keys")
    assert [key.name for key in found] == ["ann of accounts", "line 4"]
    assert [key.digest for key in found] == [hashlib.sha256(key.encode()).digest() for key in (GOOD, OTHER)]
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


@settings(max_examples=30)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_content_is_keys_or_an_error_that_does_not_show_them(content: bytes) -> None:
    complaint = ""
    try:
        found = parse(content, "the file")
    except KeysError as error:
        complaint = str(error)
    if complaint:
        assert complaint.startswith("the file")
        assert all(letter in string.printable for letter in complaint)
    else:
        assert found
        assert len({key.digest for key in found}) == len(found)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "contains no key"),
        (b"\xff\xfe\n", "not UTF-8"),
        ("clé\n".encode(), "line 1: a key must be one word of printable ASCII"),
        (b"ok\na,b\n", "line 2: a key must be one word of printable ASCII characters without commas"),
        (b"same ann\nother\nsame bo\n", "line 3: duplicate key"),
        (HASHED.encode(), "line 1: .*64 hexadecimal digits"),
        (f"{LINE} max-concurrent=0 ann".encode(), "line 1: .*with N of at least 1"),
        (f"{LINE} rpm=5 ann".encode(), "line 1: .*the only option is max-concurrent=N"),
        (f"{LINE}\nsesame".encode(), "line 2: duplicate key"),
    ],
)
def test_invalid_keys_file_error_does_not_reveal_keys(content: bytes, complaint: str) -> None:
    with pytest.raises(KeysError, match=f"^the file.*{complaint}") as caught:
        parse(content, "the file")
    assert not any(word in str(caught.value) for word in ("clé", "same", "a,b", DIGEST.hex()))


def test_prefix_namespace_is_of_the_owners_name_or_else_of_the_key() -> None:
    def namespaces(content: str) -> list[str]:
        return [key.prefix_namespace for key in parse(content.encode(), "keys")]

    ann, again, bob = namespaces(f"{GOOD} ann\n{OTHER} ann\nkey-3 bob\n")
    assert ann == again != bob
    assert namespaces("rotated ann") == [ann]
    # A line number is no name: what moves up a line does not inherit.
    first, second = namespaces(f"{GOOD}\n{OTHER}\n")
    assert namespaces(OTHER) == [second] != [first]
    assert namespaces(f"{OTHER} line 1") != [first]
    assert ApiKeys([GOOD, OTHER]).prefix_namespaces == {first, second}
    key = ApiKey.of(GOOD, "key 1", "here", is_named=False)
    assert not any(secret in repr(key) for secret in (GOOD, hashlib.sha256(GOOD.encode()).hexdigest()))
    assert re.fullmatch("[0-9a-f]{32}", key.prefix_namespace)
    assert key.prefix_namespace not in key.digest.hex()


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
