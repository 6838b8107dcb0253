"""Output processing: detokenizing, and splitting an answer into reasoning, content and tool calls. No MLX."""
