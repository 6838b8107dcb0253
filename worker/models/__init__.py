"""What a model is, how it is loaded, and how requests are put before it."""
