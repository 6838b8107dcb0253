"""Structured output: grammars of response formats and tool calls, compiled by llguidance, and guides."""
