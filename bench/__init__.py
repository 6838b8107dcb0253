"""Benchmarks against other servers and baselines, run as commands. Each prints a table; none is a test."""
