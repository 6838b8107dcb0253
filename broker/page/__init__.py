"""The page at `/`: what goes on here, and a playground. It asks the same API as everybody else."""
