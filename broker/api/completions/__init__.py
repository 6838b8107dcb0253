"""OpenAI's legacy text completions."""
