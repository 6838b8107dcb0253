"""Draft models and the target's own multi-token-prediction layers."""
