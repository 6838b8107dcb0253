"""The worker: runs one model. Only its model thread uses MLX."""
