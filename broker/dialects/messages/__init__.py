"""Anthropic's messages: `body`, `conversation` and `request` on the way to a worker, `blocks` and `answer` on
the way back, and `errors`, which have a shape of their own.
"""
