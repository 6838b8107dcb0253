"""Anthropic's messages. Requests: `content`, `body`, `conversation`, `request`. Answers: `blocks`, `answer`,
and `errors`, which have their own format.
"""
