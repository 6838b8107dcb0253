"""The gateway: HTTP for clients, ZeroMQ to workers; it survives the loss of every worker. No MLX, no
numpy."""
