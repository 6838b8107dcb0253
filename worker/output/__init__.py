"""From tokens to the channels of an answer. Knows no MLX."""
