"""Load generator for any OpenAI-compatible chat completions endpoint: `roundhouse bench`."""
