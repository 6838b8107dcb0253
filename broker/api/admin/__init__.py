"""For operators: models and downloads, adapters, caches, requests, status and metrics."""
