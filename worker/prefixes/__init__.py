"""What is stored of prefixes: the index, which decides, and the files on the disk. Knows no MLX."""
