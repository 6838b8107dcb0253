"""Model loading: config, memory fit, weights, drafters, capability probes, and request preparation."""
