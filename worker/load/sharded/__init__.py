"""Models split over several ranks by tensor or pipeline parallelism."""
