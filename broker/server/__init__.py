"""HTTP server: uvicorn with bounded connections, the listening sockets, and what keeps the event loop free.

Knows no ZeroMQ.
"""
