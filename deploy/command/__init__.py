"""The roundhouse command."""
