"""What a model is, whether it fits, how it is loaded, and how requests are put before it."""
