"""OpenAI's responses. Requests: `body`, `request`. Answers: `output`, `answer`.

`items`: the elements of both, input and output. `store`: stored responses, which a client can continue by id.
"""
