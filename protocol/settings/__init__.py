"""Settings of all processes: how they are declared and read, and those of gateway and workers."""
