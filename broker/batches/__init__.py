"""Batches: files of requests that are run when nothing interactive is, and that survive every restart."""
