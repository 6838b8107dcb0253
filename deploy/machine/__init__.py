"""This machine: downloaded models, memory, and diagnosis."""
