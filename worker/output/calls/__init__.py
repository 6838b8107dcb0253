"""Streaming tool-call parsers: find calls in a model's output and stream their arguments as JSON."""
