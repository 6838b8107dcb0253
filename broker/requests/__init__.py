"""The application layer of every API: from a request's body to a worker to a response. Knows no ZeroMQ."""
