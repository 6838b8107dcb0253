"""What gateway and workers have in common: the wire between them, the error table, and how a process starts.

The ground of the house: imported by `broker`, `worker` and `deploy`, and imports none of them.
"""
