"""The gateway's ends of two lines: to the workers, and to its supervisor. Knows no HTTP."""
