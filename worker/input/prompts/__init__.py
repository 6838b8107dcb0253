"""Prompt preparation: chat templates, tokenization, fill-in-the-middle, structured output."""
