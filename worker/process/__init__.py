"""Before and beside the model: the process's environment, spares, exit codes, watchdog and metrics."""
