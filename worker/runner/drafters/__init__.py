"""Networks that draft: draft models and multi-token-prediction layers."""
