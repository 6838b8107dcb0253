"""KV caches over upstream's: batched, rolled back, stored and restored."""
