"""Caches of many rows: laid out for decoding together, over whatever mix of layers upstream makes."""
