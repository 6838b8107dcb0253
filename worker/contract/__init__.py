"""Interfaces between the worker's layers, and the values passed between them. The lowest layer: imports no
MLX."""
