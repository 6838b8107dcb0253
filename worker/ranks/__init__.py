"""One model on several ranks (processes): the leader, rank 0, is the worker; followers execute its calls."""
