"""Settings, models and command lines of `serve` and its children."""
