"""HTTP server layer: connections, API keys, limits, request bodies, and responses over flights. Knows no
ZeroMQ."""
