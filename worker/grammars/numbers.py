"""Numeric bounds as llguidance enforces them exactly. Pure.

llguidance compares decimal texts, and allows the excluded end of a range narrower than 1. A client compares
64-bit floats: `0.99999999999999999` is 1. So each bound becomes inclusive, an excluded one the next float
that llguidance reads exactly. A bound beside `multipleOf` becomes the next multiple, so that an empty range
is recognized.
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
TINY = 1e-50
"""Smallest positive bound: a smaller one is nested too deeply as a regular expression."""
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
        tightest = max(found) if inwards > 0 else min(found)
        bounded.pop(exclusive, None)
        bounded[inclusive] = tightest if step is None else _multiple(tightest, step, inwards)
    return bounded


def _rounded(bound: float, inwards: float, keyword: str, *, is_excluded: bool) -> float:
    """Round a bound to a float that can be written, towards the allowed side."""
    if (bound < 0) == (inwards > 0):  # a wide bound can be narrowed to the range of 64 bits
        bound = max(-BOUND_MAX, min(bound, BOUND_MAX))
    if abs(bound) > BOUND_MAX:
        raise SchemaError(f"has a bound of {bound}, which no 64-bit number satisfies", keyword)
    near = float(bound)
    is_outside = near < bound if inwards > 0 else near > bound
    if is_outside or (is_excluded and near == bound):
        near = math.nextafter(near, inwards)
    if 0 < abs(near) < TINY:
        near = math.copysign(TINY, inwards) if near * inwards > 0 else 0.0
    for _ in range(STEPS_MAX):
        if is_read_exactly(near):
            return int(near) if near.is_integer() and abs(near) <= EXACT_MAX else near
        near = math.nextafter(near, inwards)
    raise SchemaError(f"has a bound of {bound}, which llguidance does not read exactly", keyword)


def is_read_exactly(number: float) -> bool:
    """Whether llguidance reads the digits of a float as the same one; some of 16 or 17 digits it does not."""
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    if not isinstance(exponent, int):
        return False
    found, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    return (found * power if exponent > 0 else found / power) == abs(number)


def _multiple(bound: float, step: Fraction, inwards: float) -> float:
    count = Fraction(Decimal(str(bound))) / step
    exact = step * (math.ceil(count) if inwards > 0 else math.floor(count))
    return int(exact) if exact.denominator == 1 and abs(exact) <= EXACT_MAX else float(exact)
