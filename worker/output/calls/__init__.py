"""Calls of tools in what a model says: found, read as they grow, and given out as JSON."""
