"""Transport: the gateway's connections to the workers and to its supervisor. Knows no HTTP."""
