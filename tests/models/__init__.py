"""Tiny random-weight models for the tests, loaded by upstream's real loaders."""
