"""Anthropic's messages. Requests: `content`, `body`, `conversation`, `request`. Answers: `blocks`, `answer`.

Errors have a format of their own (`dialects.anthropic`).
"""
