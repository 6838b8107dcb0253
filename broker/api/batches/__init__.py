"""Batches: files of requests that are run when nothing interactive is, and that survive every restart.

Modules whose names begin with “message” are for Anthropic's API.
"""
