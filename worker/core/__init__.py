"""Engine core: decides on the model thread, step by step, which rows run, end or are stored. No MLX."""
