"""What each process does by itself, in the same way: logs, folders, private files, models' folders."""
