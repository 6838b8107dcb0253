"""The connection to the gateway: the I/O thread with sessions and requests, and the model thread. No MLX."""
