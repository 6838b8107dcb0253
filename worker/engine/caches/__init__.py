"""The caches of rows: over upstream's, in batches, and as they are stored."""
