"""`make bench BENCH=versus`: this server and others, side by side."""
