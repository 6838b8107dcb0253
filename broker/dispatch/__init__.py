"""Who is served by whom: flights, workers, admission, failover, which models run. Pure, clock handed in."""
