"""All that touches MLX once a model is there: rows, their caches, how their tokens are drawn."""
