"""The I/O thread: the line to the gateway, the preparers' pool, the model thread's frame. Knows no MLX."""
