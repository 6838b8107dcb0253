"""Draft models, trained drafters and the target's own multi-token-prediction layers."""
