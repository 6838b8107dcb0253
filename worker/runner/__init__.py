"""The model runner: KV caches, batched forward passes, speculative decoding and sampling on MLX."""
