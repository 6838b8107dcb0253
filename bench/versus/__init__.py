"""`make bench BENCH=versus`: this server compared with others."""
