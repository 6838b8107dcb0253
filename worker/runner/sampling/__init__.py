"""Sampling for all rows of a batch at once."""
