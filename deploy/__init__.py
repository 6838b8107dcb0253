"""The `roundhouse` command: starts, supervises and installs gateway and workers. Imports neither."""
