"""What serve is told, and what it runs: settings, models, command lines."""
