"""Model loading: from a folder to a model, with its weights, adapters, drafters and capabilities."""
