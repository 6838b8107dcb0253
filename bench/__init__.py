"""Side-by-side measurements, as commands. Each prints a table; none is a test."""
