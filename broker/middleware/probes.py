"""Paths that are polled, whose refusals say nothing about a client."""

PROBES = frozenset({"/health", "/ready"})
"""Health probes: polled often by load balancers, without a key; "not ready" is not an error there."""

STATUS_STREAM = "/v1/status/stream"
"""What the page at `/` asks for first, to learn whether it needs a key."""
