"""Coding agents for the terminal, and the settings with which each uses our endpoint."""
