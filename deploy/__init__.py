"""The `roundhouse` command: starts the processes, supervises them, installs them. Imports neither of them."""
