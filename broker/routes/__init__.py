"""HTTP routes: one module for each API or topic, with its `ROUTES`.

A new API is a dialect (`dialects`), a module here, and a line in `app.ROUTES`; shared code is in
`generation`. If its errors differ from OpenAI's, add an envelope to `http.errors.ENVELOPES`. Knows no ZeroMQ.
"""
