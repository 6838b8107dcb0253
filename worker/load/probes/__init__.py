"""Capability probes of a loaded network, their cache on disk, and the measured cost of verify steps."""
