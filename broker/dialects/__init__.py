"""One module per public API, in two pure halves: body -> `Generate`, and items of a flight -> SSE or JSON."""
