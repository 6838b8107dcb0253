"""The worker: owns one model. Everything that touches MLX runs on one thread of it."""
