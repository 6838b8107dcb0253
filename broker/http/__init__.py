"""HTTP as clients speak it: connections, keys, limits, bodies, responses over flights. Knows no ZeroMQ."""
