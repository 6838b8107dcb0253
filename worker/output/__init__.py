"""From tokens to text. Knows no MLX."""
