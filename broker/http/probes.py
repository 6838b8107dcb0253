"""What load balancers ask, again and again and without a key: "not yet" is an answer there, no failure."""

PROBES = frozenset({"/health", "/ready"})
