"""One folder per API: its bodies (in), its renderers (out), and `routes` with the paths, in `ROUTES`.

A new API is a folder here, its renderer in `rendering`, its operations in `openapi`, and a line in
`app.ROUTES`; what several APIs share is in `dialects`, and what runs a request in `requests`. If its errors
differ from OpenAI's, add an envelope to `middleware.errors.ENVELOPES`. All modules are pure but the routes
and, of `batches`, the runner and the store. Knows no ZeroMQ.
"""
