"""What this machine has: models at hand, memory, and whether all is as it should be."""
