"""A load generator for any endpoint of OpenAI's chat completions: `roundhouse bench`."""
