"""Keeps processes running in the foreground: a pure lifecycle, and what carries it out."""
