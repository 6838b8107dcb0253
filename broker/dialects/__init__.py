"""One module per public API, in two pure halves: body -> protocol.Generate, events -> SSE or JSON."""
