"""The I/O thread: connection to the gateway, preparer pool, start of the model thread. Does not use MLX."""
