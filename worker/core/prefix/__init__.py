"""Prefix cache: the index, which decides what is stored, its store in memory and files on disk. No MLX."""
