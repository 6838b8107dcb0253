"""What the model thread decides, step by step: who runs, who ends, what is stored. Knows no MLX."""
