"""The gateway: speaks HTTP with clients and ZeroMQ with workers; survives every worker. No MLX, no numpy."""
