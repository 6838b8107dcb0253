"""The journal: what a gateway's successor needs of its answers, in one SQLite file, written by one thread."""
