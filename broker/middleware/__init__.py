"""Middlewares, around each request: id, origin, API key, body, limits, time and errors. Knows no ZeroMQ."""
