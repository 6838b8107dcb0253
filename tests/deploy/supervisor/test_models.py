"""Models that are loaded when the supervisor starts."""

from __future__ import annotations

from deploy.supervisor.child import ServedModel, first_loaded


def test_it_starts_with_the_residents_or_else_with_the_first() -> None:
    plain = [ServedModel(name=name) for name in ("a", "b")]
    resident = ServedModel(name="c", resident=True)
    assert first_loaded(plain) == plain[:1]
    assert first_loaded([*plain, resident]) == [resident]
    assert first_loaded([]) == []
