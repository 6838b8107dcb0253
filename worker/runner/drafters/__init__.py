"""Networks that draft: draft models, multi-token-prediction layers and trained drafters."""
