"""Embedding and reranking models: loading, and preparing texts."""
