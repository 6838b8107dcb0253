"""Numeric bounds as llguidance enforces them exactly. Pure.

llguidance allows an excluded bound that is whole and nearer to 0 than the other one, if they are less than 1
apart. So an excluded bound becomes inclusive: the next float that llguidance reads exactly. Only a short one
that is farther from 0 stays, because `0.9` must remain possible below 1: llguidance refuses texts with fewer
digits than that bound. A bound beside `multipleOf` becomes the next multiple, so that an empty range is
recognized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

from worker.grammars.references import Schema, SchemaError, items

MULTIPLE_MAX = 10_000
"""Maximum of `multipleOf` without its decimal point: the automaton that divides has as many states."""
EXACT_MAX = 2**53
"""Largest range in which every integer is a float64, which llguidance computes with."""
BOUND_MAX = 9_200_000_000_000_000_000
"""Largest numeric bound that llguidance accepts, slightly below the signed 64-bit limit."""
TINY = 1e-48
"""Smallest positive bound: a smaller one is nested too deeply as a regular expression."""
SHORT_MAX = 10**6
"""Limit of excluded bounds that stay, with at most 6 decimals. A text needs 10 more nines to round to one."""
STEPS_MAX = 100
"""Maximum number of floats by which a bound is moved to one that llguidance reads exactly; 2 are usual."""

_BOUNDS: Mapping[str, tuple[str, float]] = {
    "minimum": ("exclusiveMinimum", math.inf),
    "maximum": ("exclusiveMaximum", -math.inf),
}
"""Each inclusive bound with the exclusive one, and the direction of the allowed side."""


def with_exact_bounds(schema: Schema) -> Schema:
    """Return a schema with inclusive bounds that are floats. Raises `SchemaError` for those out of range."""
    step = schema.get("multipleOf")
    if not isinstance(step, int | float) or isinstance(step, bool) or not 0 < step < math.inf:
        return _bounded(schema, None)
    exact = Fraction(Decimal(str(step)))
    if int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits))) > MULTIPLE_MAX:
        message = f"has a 'multipleOf' of {step}; without its decimal point it must be at most {MULTIPLE_MAX}"
        raise SchemaError(message, "multipleOf")
    if exact.denominator == 1 and schema.get("type") == "number":
        schema = schema | {"type": "integer"}  # some parsers round numbers like 1.0
    kinds = items(schema.get("type")) or [schema.get("type")]
    if "integer" in kinds and "number" not in kinds and exact.numerator <= MULTIPLE_MAX:
        exact = Fraction(exact.numerator)  # the integers among the multiples of 3/4 are those of 3
        schema = schema | {"multipleOf": exact.numerator}
    return _bounded(schema, exact)


def _bounded(schema: Schema, step: Fraction | None) -> Schema:
    bounded = dict(schema)
    for inclusive, (exclusive, inwards) in _BOUNDS.items():
        is_draft_4 = schema.get(exclusive) is True  # then the other one is excluded
        found = [
            _rounded(bound, inwards, keyword, is_excluded=is_draft_4 or keyword == exclusive)
            for keyword in (inclusive, exclusive)
            if isinstance(bound := schema.get(keyword), int | float) and not isinstance(bound, bool)
        ]
        if not found:
            continue
        for keyword in (inclusive, exclusive):
            bounded.pop(keyword, None)
        bound, is_excluded = max(found, key=lambda each: (math.copysign(1, inwards) * each[0], each[1]))
        if step is not None:
            bound, is_excluded = _multiple(bound, step, inwards, is_excluded=is_excluded), False
        bounded[exclusive if is_excluded else inclusive] = bound
    return bounded


def _rounded(bound: float, inwards: float, keyword: str, *, is_excluded: bool) -> tuple[float, bool]:
    """Round a bound to a float that can be written, towards the allowed side. Also return whether it is
    excluded."""
    is_outer = bound != 0 and (bound < 0) == (inwards > 0)
    if is_outer:  # it can be narrowed to the range of 64 bits
        bound = max(-BOUND_MAX, min(bound, BOUND_MAX))
    if abs(bound) > BOUND_MAX:
        raise SchemaError(f"has a bound of {bound}, which no 64-bit number satisfies", keyword)
    near = float(bound)
    is_outside = near < bound if inwards > 0 else near > bound
    is_excluded = is_excluded and near == bound
    if is_outside or (is_excluded and not (is_outer and abs(near) < SHORT_MAX and near == round(near, 6))):
        near, is_excluded = math.nextafter(near, inwards), False
    if 0 < abs(near) < TINY:
        near, is_excluded = math.copysign(TINY, inwards) if near * inwards > 0 else 0.0, False
    for _ in range(STEPS_MAX):
        if near.is_integer() and abs(near) <= EXACT_MAX:
            return int(near), is_excluded
        if is_read_exactly(near):
            return near, is_excluded
        near, is_excluded = math.nextafter(near, inwards), False
    raise SchemaError(f"has a bound of {bound}, which llguidance does not read exactly", keyword)


def _multiple(bound: float, step: Fraction, inwards: float, *, is_excluded: bool) -> float:
    """Return the multiple at or next to a bound."""
    count = Fraction(Decimal(str(bound))) / step
    whole = math.ceil(count) if inwards > 0 else math.floor(count)
    if is_excluded and whole == count:
        whole += 1 if inwards > 0 else -1
    exact = step * whole
    return int(exact) if exact.denominator == 1 and abs(exact) <= EXACT_MAX else float(exact)


def is_read_exactly(number: float) -> bool:
    """Whether llguidance reads the digits of a float as the same one; some of 16 or 17 digits it does not."""
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    if not isinstance(exponent, int):
        return False
    found, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    return (found * power if exponent > 0 else found / power) == abs(number)
