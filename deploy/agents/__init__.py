"""Agents that people run in their terminals: what each of them needs to work with an endpoint of ours."""
