"""OpenAI's files, of which batches are made."""
