"""Paths of health probes: polled often by load balancers, without a key; "not ready" is not an error
there."""

PROBES = frozenset({"/health", "/ready"})
