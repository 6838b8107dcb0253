"""Where HTTP meets what the gateway can do: one module for each API or topic, with its `ROUTES`.

A new API is a dialect (`dialects`), a module here, and a line in `app.ROUTES`; what several share is in
`generation`. If its errors look otherwise than OpenAI's, `http.errors.ENVELOPES` says how. Knows no ZeroMQ.
"""
