"""Prefix cache: the index, which decides what is stored, and the files on disk. No MLX."""
