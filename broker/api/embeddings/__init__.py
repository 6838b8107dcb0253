"""OpenAI's embeddings, and reranking as in Cohere, Jina and vLLM."""
