"""OpenAI's responses: `body` and `request` on the way to a worker, `output` and `answer` on the way back.

`items` are what both ways are made of: what a client says, and what it is answered. `store` keeps answers, so
that a client can go on from one by its id alone.
"""
