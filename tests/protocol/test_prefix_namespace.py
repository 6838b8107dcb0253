"""Salts of the prefix cache in namespaces: no two owners have one salt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.prefix_namespace import contains, salt_in

namespaces = st.text("0123456789abcdef", max_size=3)
salts = st.text("/0aé\0", max_size=5)


@given(namespaces, salts, namespaces, salts)
def test_salts_differ_unless_namespace_and_cache_salt_are_equal(
    namespace: str, salt: str, other_namespace: str, other_salt: str
) -> None:
    is_same = (namespace, salt) == (other_namespace, other_salt)
    assert (salt_in(namespace, salt) == salt_in(other_namespace, other_salt)) == is_same


@given(namespaces, namespaces, salts)
def test_namespace_contains_its_own_salts_and_the_empty_one_contains_all(
    namespace: str, other: str, salt: str
) -> None:
    assert contains(namespace, salt_in(other, salt)) == (namespace in ("", other))


def test_salts_without_a_namespace_stay_as_clients_send_them() -> None:
    assert [salt_in("", salt) for salt in ("", "tenant")] == ["", "tenant"]
