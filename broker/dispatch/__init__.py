"""Gateway core: flights, workers, admission, routing, failover and residency. Pure; the clock is injected."""
