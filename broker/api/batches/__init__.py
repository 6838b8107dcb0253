"""Batches: files of requests that are run when nothing interactive is, and that survive every restart.

What begins with `message_` is the same in Anthropic's API.
"""
